"""The engine on tiny random models: greedy tokens are transformers', whatever the batch, budget, cache and preemptions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.backends import BACKENDS
from tests.support.handed_over import hand_over
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

MAX_TOKENS = 24
KINDS = ["llama", "qwen2", "qwen3", "mistral"]


def prompts() -> list[tuple[int, ...]]:
    """Eight, 1 to 70 tokens; every second one begins like the one before it."""
    generator = random.Random(5)
    drawn: list[tuple[int, ...]] = []
    for length in (1, 2, 15, 33, 40, 70, 31, 64):
        tokens = tuple(generator.randrange(VOCAB_SIZE) for _ in range(length))
        beginning = drawn[-1][: length // 2] if len(drawn) % 2 else ()
        drawn.append((*beginning, *tokens[len(beginning) :]))
    return drawn


@dataclass(frozen=True)
class Reference:
    """A model folder loaded here, and transformers' greedy answers to prompts()."""

    folder: Path
    loaded: LoadedModel
    answers: list[tuple[int, ...]]


@pytest.fixture(scope="module", params=KINDS)
def answered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """A model folder, and transformers' greedy answers to prompts()."""
    transformers = pytest.importorskip("transformers")
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return folder, [_generate(model, prompt) for prompt in prompts()]


@pytest.fixture(scope="module", params=BACKENDS)
def reference(request: pytest.FixtureRequest, answered: tuple[Path, list[tuple[int, ...]]]) -> Iterator[Reference]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder, answers = answered
    yield Reference(folder, load_model(EngineConfig(model=str(folder), backend=request.param, dtype="float32")), answers)
    torch.set_num_threads(num_threads)


def _generate(model: torch.nn.Module, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids: Tensor = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)  # type: ignore[operator]
    return tuple(output[0, len(prompt) :].tolist())


def request(index: int, **changes: object) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return replace(EngineRequest(str(index), prompts()[index], sampling), **changes)  # type: ignore[arg-type]


def engine_of(reference: Reference, **settings: int) -> Engine:
    given = {"num_blocks": 128, "max_num_batched_tokens": 64, **settings}
    config = EngineConfig(model=str(reference.folder), speculation="none", **given)  # type: ignore[arg-type]
    return open_engine(config, reference.loaded)


def test_one_at_a_time_and_again_from_the_cache(reference: Reference) -> None:
    engine = engine_of(reference)
    for _ in range(2):
        for index, expected in enumerate(reference.answers):
            engine.add(request(index))
            assert run_to_end(engine).answer(str(index)).token_ids == expected, f"prompt {index}"
    assert engine.stats().num_prefix_hit_tokens > 0


@pytest.mark.parametrize("budget", [7, 64, 512])
@pytest.mark.parametrize("num_blocks", [12, 128])
def test_batched_in_chunks_with_and_without_preemption(reference: Reference, budget: int, num_blocks: int) -> None:
    engine = engine_of(reference, max_num_batched_tokens=budget, num_blocks=num_blocks)
    for index in range(len(reference.answers)):
        assert engine.add(request(index))
    collector = run_to_end(engine)
    assert [collector.answer(str(index)).token_ids for index in range(len(reference.answers))] == reference.answers
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 12)
    assert engine.stats().num_free_blocks == num_blocks


def test_resumed_behind_any_history(reference: Reference) -> None:
    engine = engine_of(reference)
    for index, expected in enumerate(reference.answers):
        num_emitted = min(1 + 3 * index, len(expected) - 1)
        engine.add(request(index, emitted=(expected[:num_emitted],)))
        assert run_to_end(engine).answer(str(index)).token_ids == expected[num_emitted:], f"prompt {index}"


def test_prefilled_in_one_engine_and_decoded_in_another(reference: Reference) -> None:
    prefill, decode = engine_of(reference, max_num_batched_tokens=16), engine_of(reference, num_blocks=64)
    for index, expected in enumerate(reference.answers):
        prefill.add(request(index, prefill_only=True))
        [first] = run_to_end(prefill).answer(str(index)).token_ids
        hand_over(prefill, decode, request(index), {0: first})
        assert (first, *run_to_end(decode).answer(str(index)).token_ids) == expected, f"prompt {index}"


@pytest.mark.parametrize("kind", ["llama"])
def test_sampled_choices_do_not_depend_on_budget_or_pool(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = make_tiny_model(tmp_path, kind)
    loaded = load_model(EngineConfig(model=str(folder)))
    reference = Reference(folder, loaded, [])
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=MAX_TOKENS, n=3, seed=11, logprobs=2)
    answers = []
    for budget, num_blocks in ((512, 128), (9, 128), (33, 14)):
        engine = engine_of(reference, max_num_batched_tokens=budget, num_blocks=num_blocks)
        for index in range(4, 8):
            engine.add(request(index, sampling=sampling))
        collector = run_to_end(engine)
        answers.append({key: collector.answer(*key) for key in collector.choices})
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 12
