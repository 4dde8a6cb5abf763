"""A prompt whose blocks vLLM gives to others while it is computed: what was announced of it must not be handed off."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdmesh.engine.outputs import FinishReason, StepResult
from tests.worker.engines.engines import Kind, Vllm
from tests.worker.engines.harness import GREEDY, request

if TYPE_CHECKING:
    from pdmesh_vllm.core import VllmCore

NUM_OTHERS = 6
GROWING = replace(GREEDY, max_tokens=380)


def step(core: VllmCore) -> StepResult:
    result = core.step()
    assert result is not None
    return result


@pytest.mark.parametrize("kind", ["vllm"], indirect=True)
def test_a_prefill_that_loses_its_blocks_ends_and_is_announced_no_more(kind: Kind) -> None:
    """Six sequences have 8 of 64 blocks each and are about to need a ninth, when a prompt of 13 comes that still fits."""
    assert isinstance(kind, Vllm)
    core = kind.engine.core
    for number in range(NUM_OTHERS):
        assert core.add(request(f"other {number}", 100, GROWING, salt=number))
    while core.stats().decode_context < NUM_OTHERS * 252:
        step(core)
    assert core.num_free_blocks == 64 - 8 * NUM_OTHERS
    assert core.add(replace(request("prompt", 400, salt=9), prefill_only=True))
    results = [step(core)]
    assert any(ready.request_id == "prompt" for ready in results[-1].ready)
    while not (ends := [each for each in results[-1].updates if each.request_id == "prompt"]):
        results.append(step(core))
    assert [each.finish_reason for each in ends] == [FinishReason.PREEMPTED] and not ends[0].token_ids
    assert not any(ready.request_id == "prompt" for ready in results[-1].ready)
    assert not core.release("prompt"), "it was released when it lost its blocks"
    for number in range(NUM_OTHERS):
        core.release(f"other {number}")
    while core.step() is not None:
        pass
    core.check_integrity()
    assert core.num_free_blocks == 64
