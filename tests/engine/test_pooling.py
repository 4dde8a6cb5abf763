"""Embeddings: pooled hidden states are transformers' own, whatever the chunks, the batch, the cache and preemptions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.errors import InvalidRequest
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.outputs import SequenceUpdate
from pdmesh.engine.request import EngineRequest, Pooling
from pdmesh.models.registry import ensure_model
from pdmesh.sampling_params import SamplingParams
from tests.engine.model_kinds import KINDS
from tests.engine.test_engine_model import prompts
from tests.engine.test_model_transformers import reference
from tests.support.mock_engine import open_engine
from tests.support.tiny_models import make_tiny_model

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
BACKENDS = ["torch", "native"]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A model folder, and transformers' last hidden states of all prompts, [T, hidden_size]."""
    transformers = pytest.importorskip("transformers")
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return folder, [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts()]


@pytest.fixture(scope="module", params=BACKENDS)
def loaded(request: pytest.FixtureRequest, known: tuple[Path, list[Tensor]]) -> Iterator[LoadedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(EngineConfig(model=str(known[0]), backend=request.param, dtype="float32"))
    torch.set_num_threads(num_threads)


def engine_of(loaded: LoadedModel, folder: Path, **settings: int) -> Engine:
    given = {"num_blocks": 128, "max_num_batched_tokens": 64, **settings}
    return open_engine(EngineConfig(model=str(folder), speculation="none", **given), loaded)  # type: ignore[arg-type]


def embed(number: int, pooling: Pooling, name: str = "") -> EngineRequest:
    return EngineRequest(name or f"{pooling.value}-{number}", prompts()[number], ONE_TOKEN, pooling=pooling)


def run(engine: Engine) -> dict[str, list[SequenceUpdate]]:
    updates: dict[str, list[SequenceUpdate]] = {}
    while engine.has_work:
        result = engine.step()
        assert result is not None
        for update in result.updates:
            updates.setdefault(update.request_id, []).append(update)
    engine.check_integrity()
    return updates


def wanted(states: Tensor, pooling: Pooling) -> Tensor:
    return states.mean(0) if pooling is Pooling.MEAN else states[-1]


def check(update: SequenceUpdate, states: Tensor, pooling: Pooling) -> None:
    torch.testing.assert_close(torch.tensor(update.pooled), wanted(states, pooling), rtol=1e-4, atol=1e-5)
    assert update.finish_reason is not None


@pytest.mark.parametrize("budget", [7, 64, 512])
def test_pooled_states_are_transformers_own(loaded: LoadedModel, known: tuple[Path, list[Tensor]], budget: int) -> None:
    folder, states = known
    engine = engine_of(loaded, folder, max_num_batched_tokens=budget, max_num_seqs=16)
    for pooling in Pooling:
        for number in range(len(prompts())):
            assert engine.add(embed(number, pooling))
    updates = run(engine)
    for pooling in Pooling:
        for number, expected in enumerate(states):
            [update] = updates[f"{pooling.value}-{number}"]
            check(update, expected, pooling)
    engine.close()


def test_a_cached_prefix_changes_nothing(loaded: LoadedModel, known: tuple[Path, list[Tensor]]) -> None:
    folder, states = known
    engine = engine_of(loaded, folder)
    for again in range(2):
        for pooling in Pooling:
            assert engine.add(embed(5, pooling, f"{again}-{pooling.value}"))
            [update] = run(engine)[f"{again}-{pooling.value}"]
            check(update, states[5], pooling)
    assert engine.stats().num_prefix_hit_tokens > 0  # of the last token's state, which needs no others
    engine.close()


def test_other_requests_of_the_step_draw_what_they_would_alone(loaded: LoadedModel, known: tuple[Path, list[Tensor]]) -> None:
    folder, states = known

    def generate(number: int) -> EngineRequest:
        return EngineRequest(f"g{number}", prompts()[number], SamplingParams(temperature=1.0, seed=3, max_tokens=6, n=2))

    alone, among = engine_of(loaded, folder), engine_of(loaded, folder, max_num_seqs=16)
    for number in range(3):
        assert alone.add(generate(number))
        assert among.add(embed(number + 3, Pooling.MEAN)) and among.add(generate(number))
        assert among.add(embed(number + 3, Pooling.LAST))
    expected, found = run(alone), run(among)

    def tokens(updates: list[SequenceUpdate]) -> list[tuple[int, int, tuple[int, ...]]]:
        return sorted((update.choice, update.index, update.token_ids) for update in updates)

    for number in range(3):
        assert tokens(found[f"g{number}"]) == tokens(expected[f"g{number}"])
        for pooling in Pooling:
            check(found[f"{pooling.value}-{number + 3}"][0], states[number + 3], pooling)
    alone.close()
    among.close()


def test_a_preempted_prompt_begins_its_sum_anew(loaded: LoadedModel, known: tuple[Path, list[Tensor]]) -> None:
    folder, states = known
    engine = engine_of(loaded, folder, num_blocks=10, max_num_batched_tokens=2)
    older = EngineRequest("older", prompts()[4], SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
    assert engine.add(older) and engine.add(embed(5, Pooling.MEAN))
    updates = run(engine)
    assert engine.stats().num_preemptions > 0
    check(updates["mean-5"][0], states[5], Pooling.MEAN)
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_only": True},
        {"emitted": ((1,),)},
        {"sampling": SamplingParams(max_tokens=2)},
        {"sampling": SamplingParams(n=2, max_tokens=1)},
    ],
)
def test_what_goes_with_no_pooling_is_refused(
    loaded: LoadedModel, known: tuple[Path, list[Tensor]], changes: dict[str, object]
) -> None:
    engine = engine_of(loaded, known[0])
    with pytest.raises(InvalidRequest, match="sampling: pooling needs"):
        engine.add(replace(embed(0, Pooling.MEAN), **changes))  # type: ignore[arg-type]
    engine.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_final_norm(tmp_path: Path, kind: str) -> None:
    name, overrides = KINDS[kind]
    folder = make_tiny_model(tmp_path, name, **overrides)
    prompt = tuple(random.Random(3).choices(range(256), k=40))
    with torch.inference_mode():
        states = reference(folder, dtype=torch.float32)(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    for backend in BACKENDS:
        loaded = load_model(EngineConfig(model=str(folder), backend=backend, dtype="float32"))
        engine = engine_of(loaded, folder)
        for pooling in Pooling:
            assert engine.add(EngineRequest(pooling.value, prompt, ONE_TOKEN, pooling=pooling))
        updates = run(engine)
        for pooling in Pooling:
            check(updates[pooling.value][0], states, pooling)
        engine.close()


@pytest.mark.real_model
def test_the_real_model_in_float32() -> None:
    transformers = pytest.importorskip("transformers")
    folder = ensure_model("smollm2-135m-instruct", print)
    prompt = tuple(transformers.AutoTokenizer.from_pretrained(folder)("The capital of France is Paris. " * 60)["input_ids"])
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(torch.tensor([prompt])).last_hidden_state[0]
    loaded = load_model(EngineConfig(model=str(folder), dtype="float32", quantization="none", num_threads=1))
    engine = engine_of(loaded, folder, max_num_batched_tokens=512)
    for pooling in Pooling:
        assert engine.add(EngineRequest(pooling.value, prompt, ONE_TOKEN, pooling=pooling))
    updates = run(engine)
    for pooling in Pooling:
        torch.testing.assert_close(torch.tensor(updates[pooling.value][0].pooled), wanted(states, pooling), rtol=1e-4, atol=1e-4)
    engine.close()
