"""Through the engine: the same tokens with the same log-probabilities, to the last bit, alone, batched, in chunks, preempted,
from the prefix cache, resumed, and handed from a prefill engine to a decode engine; greedy and sampled."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.outputs import FinishReason, StepResult, TokenLogprobs
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.backends import needs_native
from tests.support.handed_over import hand_over
from tests.support.mock_engine import open_engine
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = needs_native
MAX_TOKENS = 20
NUMBERS: dict[str, dict[str, object]] = {
    "default": {},  # KV in int8
    "bfloat16-kv": {"kv_dtype": "bfloat16"},
    "int4": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32", "kv_dtype": "bfloat16"},
}


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


Answers = dict[tuple[str, int], Answer]


def requests() -> list[EngineRequest]:
    """Greedy and sampled with several choices, prompts of 1 to 200 tokens; every second one begins like the one before it."""
    chance, prompts = random.Random(3), list[tuple[int, ...]]()
    for length in (1, 2, 40, 70, 31, 150, 200, 16, 33):
        tokens = tuple(chance.randrange(VOCAB_SIZE) for _ in range(length))
        beginning = prompts[-1][: length // 2] if len(prompts) % 2 else ()
        prompts.append((*beginning, *tokens[len(beginning) :]))
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=MAX_TOKENS, n=3, seed=11, logprobs=2),
        SamplingParams(temperature=1.5, top_k=40, frequency_penalty=0.5, max_tokens=MAX_TOKENS, seed=2**63, logprobs=2),
    ]
    return [EngineRequest(str(i), tokens, kinds[i % 3]) for i, tokens in enumerate(prompts)]


def collect(answers: Answers, result: StepResult) -> None:
    for update in result.updates:
        answer = answers[update.request_id, update.choice]
        answer.token_ids += update.token_ids
        answer.logprobs += update.logprobs
        answer.finish_reason = update.finish_reason


def run(engine: Engine, *asked: EngineRequest) -> Answers:
    answers: Answers = defaultdict(Answer)
    for each in asked:
        assert engine.add(each)
    while (result := engine.step()) is not None:
        collect(answers, result)
    return dict(answers)


@dataclass(frozen=True)
class Model:
    """A model in one set of numbers, and the answers to requests(), each alone in an engine of its own."""

    config: EngineConfig
    answers: Answers

    def engine(self, **settings: object) -> Engine:
        config = replace(self.config, **settings)  # type: ignore[arg-type]
        engine = open_engine(config, load_model(config))
        engine.kv.tensor.view(torch.uint8).fill_(0xFF)  # NaN
        return engine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)  # the loader sets it, for torch too


@pytest.fixture(scope="module", params=NUMBERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param), "qwen3", head_dim=32)
    settings = {"num_blocks": 200, "num_threads": 1, "speculation": "none", **NUMBERS[request.param]}
    config = EngineConfig(model=str(folder), **settings)  # type: ignore[arg-type]
    model = Model(config, {})
    for each in requests():
        model.answers.update(run(model.engine(prefix_caching=False), each))
    assert len({token for answer in model.answers.values() for token in answer.token_ids}) > 50, "answers hardly vary"
    return model


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("budget", [7, 50, 512])
def test_batched(model: Model, budget: int, num_threads: int) -> None:
    engine = model.engine(max_num_batched_tokens=budget, num_threads=num_threads)
    assert run(engine, *requests()) == model.answers


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("budget", [33, 512])
def test_preempted(model: Model, budget: int, num_threads: int) -> None:
    engine = model.engine(num_blocks=18, max_num_batched_tokens=budget, num_threads=num_threads)
    assert run(engine, *requests()) == model.answers
    assert engine.stats().num_preemptions > 0


def test_from_the_prefix_cache(model: Model) -> None:
    engine = model.engine()
    assert run(engine, *requests()) == model.answers
    hits = engine.stats().num_prefix_hit_tokens
    assert run(engine, *(replace(each, request_id=each.request_id) for each in reversed(requests()))) == model.answers
    assert engine.stats().num_prefix_hit_tokens > hits + 400


@pytest.mark.parametrize("block_size", [32, 64])
def test_in_larger_blocks(model: Model, block_size: int) -> None:
    engine = model.engine(block_size=block_size, num_blocks=100, max_num_batched_tokens=60)
    assert run(engine, *requests()) == model.answers


def test_resumed_behind_any_history(model: Model) -> None:
    engine, asked = model.engine(max_num_batched_tokens=64), []
    for index, each in enumerate(requests()):
        histories = [model.answers[each.request_id, choice].token_ids[: 2 * index] for choice in range(each.sampling.n)]
        if all(model.answers[each.request_id, choice].token_ids != history for choice, history in enumerate(histories)):
            asked.append(replace(each, emitted=tuple(map(tuple, histories))))
    answers = run(engine, *asked)
    assert len(asked) > 5
    for each in asked:
        for choice, history in enumerate(each.emitted):
            whole, rest = model.answers[each.request_id, choice], answers[each.request_id, choice]
            assert [*history, *rest.token_ids] == whole.token_ids
            assert rest.logprobs == whole.logprobs[len(history) :]


def test_prefilled_in_one_engine_and_decoded_in_another(model: Model) -> None:
    prefill, decode = model.engine(max_num_batched_tokens=48), model.engine(num_threads=2, num_blocks=150)
    answers: Answers = defaultdict(Answer)
    for each in requests():
        answers.update(first := run(prefill, replace(each, prefill_only=True)))
        hand_over(prefill, decode, each, {choice: answer.token_ids[0] for (_, choice), answer in first.items()})
    while (result := decode.step()) is not None:  # all of them together
        collect(answers, result)
    assert {key: (answer.token_ids, answer.logprobs) for key, answer in answers.items()} == {
        key: (answer.token_ids, answer.logprobs) for key, answer in model.answers.items()
    }


def test_numbers_name_themselves(tmp_path: Path) -> None:
    """Workers with equal modes give equal tokens: what is computed differently must not have the same one."""
    folder = make_tiny_model(tmp_path)
    loaded = [load_model(EngineConfig(model=str(folder), **settings)) for settings in NUMBERS.values()]  # type: ignore[arg-type]
    assert len({(each.numeric_mode, each.kv_dtype) for each in loaded}) == len(loaded)
    assert all("-native4-" in each.numeric_mode for each in loaded)
