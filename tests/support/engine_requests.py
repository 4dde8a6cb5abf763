"""Requests for the mock engine, and what must be true of its answers and its pool."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.support.mock_engine import Collector, answer, write_kv

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


def request(
    request_id: str = "r",
    prompt: tuple[int, ...] = PROMPT,
    *,
    max_tokens: int = 6,
    n: int = 1,
    temperature: float = 0.0,
    emitted: tuple[tuple[int, ...], ...] = (),
    finished: tuple[bool, ...] = (),
    prefill_only: bool = False,
    ignore_eos: bool = True,
) -> EngineRequest:
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, n=n, seed=17, ignore_eos=ignore_eos)
    return EngineRequest(request_id, prompt, sampling, emitted, finished, prefill_only=prefill_only)


def assert_whole(engine: Engine) -> None:
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (stats.num_total_blocks, 0, 0)
    assert (stats.num_reserved, stats.num_held, stats.num_waiting_tokens) == (0, 0, 0)


def assert_answers(collector: Collector, *requests: EngineRequest) -> None:
    for each in requests:
        for choice in range(each.sampling.n):
            if not (each.finished and each.finished[choice]):
                assert collector.answer(each.request_id, choice) == answer(each, choice), (each.request_id, choice)


def push(engine: Engine, each: EngineRequest, kv_tokens: tuple[int, ...] | None = None) -> dict[int, int]:
    """Reserves, plays the prefill worker, and gives the first tokens that it would draw."""
    granted = engine.reserve(each)
    assert granted is not None
    write_kv(engine, granted.block_ids, kv_tokens or each.prompt, granted.num_cached_tokens)
    return {choice: answer(each, choice, max_new=1).token_ids[0] for choice in range(each.sampling.n)}


def behind(each: EngineRequest, first_tokens: dict[int, int]) -> EngineRequest:
    """The request as it stands when its first tokens are history."""
    history = [each.emitted[choice] if each.emitted else () for choice in range(each.sampling.n)]
    return replace(each, emitted=tuple((*tokens, first_tokens[choice]) for choice, tokens in enumerate(history)))
