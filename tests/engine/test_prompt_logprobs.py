"""Log-probabilities of prompts: those of transformers in float32, whatever the chunks, the batch, the cache and preemptions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine import engine as engine_module
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.outputs import SequenceUpdate
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.sampling.logprobs import logprobs_of
from pdmesh.sampling_params import SamplingParams
from tests.engine.backends import BACKENDS
from tests.support.mock_engine import open_engine
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

TOP = 3
PROMPT = tuple(random.Random(3).randrange(VOCAB_SIZE) for _ in range(70))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("scored") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    """[70, V]: what transformers thinks of the token after each one."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(-1)


@pytest.fixture(scope="module", params=BACKENDS)
def loaded(request: pytest.FixtureRequest, folder: Path) -> Iterator[LoadedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(EngineConfig(model=str(folder), backend=request.param, dtype="float32"))
    torch.set_num_threads(num_threads)


def asked(name: str = "r", prompt: tuple[int, ...] = PROMPT, **changes: object) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=TOP, ignore_eos=True)
    return EngineRequest(name, prompt, replace(params, **changes))  # type: ignore[arg-type]


def engine_of(loaded: LoadedModel, folder: Path, **settings: int) -> Engine:
    given = {"num_blocks": 128, "max_num_batched_tokens": 64, **settings}
    return open_engine(EngineConfig(model=str(folder), speculation="none", **given), loaded)  # type: ignore[arg-type]


def updates_of(engine: Engine, *requests: EngineRequest) -> dict[str, list[SequenceUpdate]]:
    assert all(map(engine.add, requests))
    updates: dict[str, list[SequenceUpdate]] = {each.request_id: [] for each in requests}
    while engine.has_work:
        result = engine.step()
        for update in result.updates if result else ():
            updates[update.request_id].append(update)
    return updates


def check(updates: list[SequenceUpdate], expected: Tensor, prompt: tuple[int, ...] = PROMPT) -> None:
    """Once, with the first update, and right."""
    first, *others = updates
    assert not any(update.prompt_logprobs for update in others)
    assert [entry.chosen[0] for entry in first.prompt_logprobs] == list(prompt[1:])
    for row, entry in zip(expected, first.prompt_logprobs, strict=False):
        assert entry.chosen[1] == pytest.approx(float(row[entry.chosen[0]]), abs=2e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=2e-4)


@pytest.mark.parametrize(("budget", "seats"), [(64, 64), (16, 64), (64, 5), (7, 1)])
def test_in_chunks_beside_others(
    loaded: LoadedModel, folder: Path, expected: Tensor, budget: int, seats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PROMPT_LOGITS_BYTES", 0)  # as many rows of logits as seats
    engine = engine_of(loaded, folder, max_num_batched_tokens=budget, max_num_seqs=seats)
    others = [EngineRequest(f"o{n}", PROMPT[n : n + 20], SamplingParams(temperature=0.0, max_tokens=9)) for n in range(seats > 4)]
    updates = updates_of(engine, *others, asked())
    check(updates["r"], expected)
    assert not any(update.prompt_logprobs for other in others for update in updates[other.request_id])


def test_a_cached_prefix_is_computed_anew_and_the_tokens_are_equal(loaded: LoadedModel, folder: Path, expected: Tensor) -> None:
    engine = engine_of(loaded, folder)
    plain = updates_of(engine, replace(asked("plain"), sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)))
    scored = updates_of(engine, asked())["r"]
    check(scored, expected)
    assert [u.token_ids for u in scored] == [u.token_ids for u in plain["plain"]]


def test_several_choices_have_them_once(loaded: LoadedModel, folder: Path, expected: Tensor) -> None:
    updates = updates_of(engine_of(loaded, folder), asked(n=3, temperature=1.0))["r"]
    check(updates, expected)
    assert {update.choice for update in updates} == {0, 1, 2}


def test_a_preempted_prompt_has_them_once(loaded: LoadedModel, folder: Path, expected: Tensor) -> None:
    """The one before it grows into its blocks while it is computed."""
    engine = engine_of(loaded, folder, num_blocks=9, max_num_batched_tokens=2, max_num_seqs=2)
    older = EngineRequest("older", PROMPT[5:36], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    updates = updates_of(engine, older, asked())
    assert engine.stats().num_preemptions
    check(updates["r"], expected)


def test_for_another_worker(loaded: LoadedModel, folder: Path, expected: Tensor) -> None:
    engine = engine_of(loaded, folder)
    assert engine.add(replace(asked(), prefill_only=True))
    updates: list[SequenceUpdate] = []
    while not updates:
        result = engine.step()
        updates = list(result.updates) if result else []
    check(updates, expected)
    engine.release("r")


def test_likeliest_of_equal_ones_is_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    first, second = logprobs_of(logits, (3, 2), 3)
    assert [token for token, _ in first.top] == [1, 2, 3] and [token for token, _ in second.top] == [0, 1, 2]
    assert first.chosen[0] == 3 and first.chosen[1] == pytest.approx(float(logits[0].log_softmax(-1)[3]))
    assert logprobs_of(logits, (0, 0), 0)[0].top == ()
