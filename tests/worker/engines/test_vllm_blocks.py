"""Blocks of vLLM's that must not be kept, found or waited for: full pools, logits that are not finite, restated reservations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.sampling.sampler import NO_TOKEN, SampledToken
from tests.worker.engines.engines import Kind, Vllm
from tests.worker.engines.harness import GREEDY, request

if TYPE_CHECKING:
    from pdmesh_vllm.core import VllmCore
    from pdmesh_vllm.engine import VllmEngine

NUM_BLOCKS = 64
pytestmark = pytest.mark.parametrize("kind", ["vllm"], indirect=True)


@pytest.fixture
def engine(kind: Kind) -> VllmEngine:
    assert isinstance(kind, Vllm)
    return kind.engine


def outputs(core: VllmCore) -> dict[str, list[int]]:
    """What the requests draw until nothing is left to do; -1 behind those that have ended with an error."""
    drawn: dict[str, list[int]] = {}
    while (result := core.step()) is not None:
        for update in result.updates:
            ended = [NO_TOKEN] if update.finish_reason is FinishReason.ERROR else []
            drawn.setdefault(update.request_id, []).extend([*update.token_ids, *ended])
    return drawn


def is_whole(core: VllmCore) -> bool:
    outputs(core)
    core.check_integrity()
    return core.num_free_blocks == NUM_BLOCKS


def kv(engine: VllmEngine, blocks: list[int]) -> list[bytes]:
    layers = range(engine.memory.num_layers)
    return [bytes(engine.memory.block_view(layer, 0, block)) for layer in layers for block in blocks]


def fill(engine: VllmEngine, granted: ReservedBlocks, content: list[bytes]) -> None:
    parts = iter(content)
    for layer in range(engine.memory.num_layers):
        for block in granted.block_ids:
            engine.memory.block_view(layer, 0, block)[:] = next(parts)


def test_requests_whose_kv_fills_the_pool_do_not_wait_for_each_other(engine: VllmEngine) -> None:
    """16 prompts of four whole blocks each: the first token that each computes needs a fifth."""
    core, names = engine.core, [f"r{number}" for number in range(16)]
    alone: dict[str, list[int]] = {}
    content: dict[str, list[bytes]] = {}
    for number, name in enumerate(names):
        assert core.add(request(name, 128, salt=number))
        alone |= outputs(core)
        assert core.add(replace(request(name, 128, salt=number, cache_root=b"prefill"), prefill_only=True))
        while not (result := core.step()) or not result.updates:
            continue
        content[name] = kv(engine, list(result.ready[-1].block_ids))
        core.release(name)
    answers = [core.reserve(request(name, 128, salt=number, cache_root=b"decode")) for number, name in enumerate(names)]
    outputs(core)
    assert core.num_free_blocks == 0
    for name, answer in zip(names, answers, strict=True):
        granted = answer.result(0)
        assert granted is not None
        fill(engine, granted, content[name])
        core.start(name, {0: alone[name][0]})
    assert outputs(core) == {name: alone[name][1:] for name in names}
    assert is_whole(core)


def without_a_token(core: VllmCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_sample", lambda logits, rows: [SampledToken(NO_TOKEN, None) for _ in rows])


def test_a_prefill_whose_logits_are_not_finite_keeps_no_block(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine.core
    without_a_token(core, monkeypatch)
    assert core.add(replace(request("r"), prefill_only=True))
    assert outputs(core) == {"r": [NO_TOKEN]}
    assert is_whole(core)


def test_blocks_that_were_cleared_are_found_by_no_prompt(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those cleared that another request has as well."""
    core = engine.core
    assert core.add(request("first", 100))
    [first] = outputs(core).values()
    assert core.add(request("beside", 100))
    beside = [token for update in core.step().updates for token in update.token_ids]  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        real = core._sample
        patch.setattr(
            core,
            "_sample",
            lambda logits, rows: [
                SampledToken(NO_TOKEN, None) if row.index == 0 else token
                for row, token in zip(rows, real(logits, rows), strict=True)
            ],
        )
        assert core.add(request("strange", 100))
        drawn = outputs(core)
    assert drawn["strange"] == [NO_TOKEN]
    assert [*beside, *drawn["beside"]] == first
    assert core.add(request("again", 100))
    assert outputs(core) == {"again": first}


def test_a_reservation_is_restated_in_a_pool_that_has_room_for_it_once(engine: VllmEngine) -> None:
    core = engine.core
    answers = [core.reserve(request(f"x{number}", 480, salt=number)) for number in range(4)]  # 15 blocks each
    outputs(core)
    assert all(answer.result(0) for answer in answers) and core.num_free_blocks == 4
    again = core.restate("x0", request("x0", 480, GREEDY, emitted=((5,),)))
    outputs(core)
    assert again.result(0) is not None
    for number in range(4):
        core.release(f"x{number}")
    assert is_whole(core)


def test_a_reservation_behind_a_prompt_that_has_no_room_is_refused_at_once(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that compute nothing would keep the engine's thread from the calls that free blocks."""
    core = engine.core
    answers = [core.reserve(request(f"x{number}", 480, salt=number)) for number in range(4)]
    outputs(core)
    assert all(answer.result(0) for answer in answers) and core.num_free_blocks == 4
    assert core.add(request("large", 200))
    late = core.reserve(request("late", 40, salt=9))
    step = Mock(wraps=core.core.step)
    monkeypatch.setattr(core.core, "step", step)
    outputs(core)
    assert late.result(0) is None and step.call_count < 5
    for name in ("x0", "x1", "x2", "x3", "large"):
        core.release(name)
    assert is_whole(core)
