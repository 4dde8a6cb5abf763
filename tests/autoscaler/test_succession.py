"""Leaders that follow one another, each with its own clock, over what the one before has saved."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.loop import NUM_TRIALS, resumed
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.settings import AutoscalerSettings
from tests.autoscaler.loop_scene import DECODE, PREFILL, SETTINGS, MemoryPlatform, Scene, usual_router
from tests.autoscaler.routers import serving
from tests.autoscaler.scenes import GOALS

KALMAN = replace(SETTINGS, forecast="kalman")


async def _lead(platform: MemoryPlatform, ahead_s: float = 0.0, settings: AutoscalerSettings = KALMAN) -> State:
    """A busy while; returns what is saved at its end."""
    async with serving(router := usual_router()):
        scene = Scene(router, platform, settings)
        scene.now_s += ahead_s
        await scene.rounds(12, requests=60)
        await scene.loop.close()
    assert platform.saved is not None
    return json.loads(json.dumps(platform.saved))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0])
async def test_a_clock_that_was_ahead_does_not_keep_the_next_leader_from_shrinking(ahead_s: float) -> None:
    platform = MemoryPlatform()
    await _lead(platform, ahead_s, SETTINGS)
    grown = dict(platform.asked)
    assert min(grown.values()) > 1
    async with serving(router := usual_router()):
        scene = Scene(router, platform, SETTINGS)
        scene.now_s += 26.0
        await scene.rounds(60, requests=1)
        assert platform.asked[PREFILL] == 1 and platform.asked[DECODE] < grown[DECODE] / 4
        await scene.loop.close()


def _put(state: State, pools: object = None, lengths: object = None, kalman: object = None) -> State:
    policy = state["policy"]
    assert isinstance(policy, dict)
    policy["pools"]["prefill"].update(pools or {})
    policy["lengths"].update(lengths or {})
    policy["forecast"]["kalman"].update(kalman or {})
    return state


@pytest.mark.parametrize(
    "broken",
    [
        {"pools": {"changes": [[1e3, float("inf")]]}},
        {"lengths": {"input_squared": 0}},
        # These restore, and bear no decision.
        {"lengths": {"burstiness": -3}},
        {"kalman": {"level": 1e300, "var_level": 1e308}},
    ],
    ids=str,
)
async def test_no_saved_state_keeps_the_next_leaders_from_leading(
    broken: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    platform = MemoryPlatform()
    platform.saved = _put(await _lead(platform), **broken)
    async with serving(router := usual_router()):
        scene = Scene(router, platform, KALMAN)
        scene.now_s += 26.0
        with caplog.at_level(logging.WARNING, "pdmesh.autoscaler.loop"):
            await scene.rounds(30, requests=200)
        assert len(scene.decisions) == 29, "each round but the first decides"
        assert [record.message.partition(", ")[2].partition(":")[0] for record in caplog.records] == ["learning starts afresh"]
        assert "need" in scene.decisions[-1].reason, "it learns"
        resumed(Policy(KALMAN, GOALS), platform.saved, scene.now_s, 30.0)  # and leaves something that can be used
        await scene.loop.close()


async def test_a_bug_that_is_not_the_states_ends_the_round_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """Once it has borne some decisions, nothing is blamed on what was restored."""
    platform = MemoryPlatform()
    await _lead(platform)
    async with serving(router := usual_router()):
        scene = Scene(router, platform, KALMAN)
        scene.now_s += 26.0
        await scene.rounds(NUM_TRIALS + 1, requests=1)
        restored = scene.parts.policy
        _put({"policy": (state := restored.save())}, lengths={"burstiness": -3})
        restored.restore(state)
        with pytest.raises(ValueError, match="burstiness"):
            await scene.rounds(1, requests=1)
        assert scene.parts.policy is restored and not caplog.records
        await scene.loop.close()
