"""Rounds against routers and workers on real sockets: what is decided is done, what fails holds, what is silent is not idle."""

from __future__ import annotations

import dataclasses

from pdmesh.autoscaler.loop import Loop, LoopSettings
from pdmesh.autoscaler.main import DryRunPlatform, DryRunRoles
from pdmesh.autoscaler.settings import PoolSettings
from pdmesh.autoscaler.views import Flip
from tests.autoscaler.collected import D, P, worker
from tests.autoscaler.loop_scene import DECODE, PREFILL, SETTINGS, MemoryPlatform, Scene, usual_router
from tests.autoscaler.routers import serving, serving_worker, told_router


async def test_load_is_followed_and_the_reason_told() -> None:
    platform = MemoryPlatform()
    async with serving(router := usual_router()):
        scene = Scene(router, platform)
        await scene.rounds(1)
        assert scene.decisions == [], "after one look nobody knows a rate"
        await scene.rounds(4, requests=60)
        assert platform.scaled and all("requests/s" in reason for _, _, reason in platform.scaled)
        assert platform.asked[PREFILL] > 1 or platform.asked[DECODE] > 1
        assert scene.texts("scale") and platform.saved is not None
        await scene.loop.close()


async def test_a_router_that_hangs_makes_everything_stay() -> None:
    platform = MemoryPlatform(prefill=3, decode=3)
    async with serving(router := usual_router()):
        scene = Scene(router, platform)
        await scene.rounds(3, requests=8)
        before = dict(platform.asked)
        router.hang = True
        platform.scaled.clear()
        for _ in range(4):
            scene.now_s += 20.0
            await scene.loop.round()
        assert platform.asked == before and not platform.scaled
        assert "does not answer" in scene.texts("hold")[-1] and len(scene.texts("hold")) == 1, "it is said once"
        assert scene.decisions[-1].held
        router.hang = False
        await scene.rounds(2, requests=8)
        assert len(scene.texts("resume")) == 1
        await scene.loop.close()


async def test_without_the_registry_nothing_changes() -> None:
    platform = MemoryPlatform()
    async with serving(router := usual_router()):
        scene = Scene(router, platform)
        await scene.rounds(2, requests=1)
        platform.scaled.clear()
        router.status.registry_connected = False
        await scene.rounds(4, requests=80)
        assert not platform.scaled and "registry" in scene.texts("hold")[-1]
        router.status.registry_connected = True
        await scene.rounds(2, requests=80)
        assert platform.scaled and scene.texts("resume")
        await scene.loop.close()


async def test_a_router_that_never_had_a_registry_has_lost_none() -> None:
    platform = MemoryPlatform()
    async with serving(router := usual_router()):
        router.status.registry_connected = False
        scene = Scene(router, platform)
        await scene.rounds(4, requests=80)
        assert platform.scaled and not scene.texts("hold")
        await scene.loop.close()


async def test_a_platform_that_refuses_is_asked_again() -> None:
    platform = MemoryPlatform()
    platform.broken = "no quota; ask for more"
    async with serving(router := usual_router()):
        scene = Scene(router, platform)
        await scene.rounds(5, requests=80)
        assert not platform.scaled and scene.texts("failed") == ["no quota; ask for more"], "told once, though tried each round"
        platform.broken = ""
        await scene.rounds(1, requests=80)
        assert platform.scaled
        await scene.loop.close()


async def test_starts_that_fail_are_told_once_until_some_succeed() -> None:
    quick = PoolSettings(start_s=2.0)
    settings = dataclasses.replace(SETTINGS, prefill=quick, decode=quick, cool_down_s=600.0, zero_after_s=600.0)
    platform = MemoryPlatform(decode=2)
    async with serving(router := usual_router()):
        scene = Scene(router, platform, settings)
        await scene.rounds(5)
        assert not platform.failed_starts, "ten seconds are not over"
        await scene.rounds(12)
        told = "replicas: not started within 10 s, and no longer counted"
        assert platform.failed_starts == [(DECODE, f"1 of 2 {told}")]
        assert platform.asked[DECODE] == 2
        router.status.workers.append(worker("d1", (D,)))
        await scene.rounds(2)
        del router.status.workers[-1]
        await scene.rounds(12)
        assert platform.failed_starts == 2 * [(DECODE, f"1 of 2 {told}")]
        await scene.loop.close()


async def test_who_does_not_lead_changes_nothing_and_goes_on_from_what_was_saved() -> None:
    platform = MemoryPlatform()
    async with serving(router := usual_router()):
        first = Scene(router, platform)
        await first.rounds(4, requests=30)
        assert platform.saved is not None
        platform.is_leader, platform.scaled = False, []
        second = Scene(router, platform)
        second.now_s = first.now_s
        await second.rounds(3, requests=90)
        assert not platform.scaled and second.loop.latest is None
        platform.is_leader = True
        await second.rounds(1, requests=90)
        assert platform.scaled, "it has watched meanwhile, and has the lengths that the other one learned"
        await first.loop.close()
        await second.loop.close()


async def test_a_saved_state_of_another_kind_is_no_obstacle() -> None:
    platform = MemoryPlatform()
    platform.saved = {"format": 99}
    async with serving(router := usual_router()):
        scene = Scene(router, platform)
        await scene.rounds(3, requests=1)
        assert scene.decisions
        await scene.loop.close()


async def test_an_idle_worker_takes_the_other_role() -> None:
    async with (
        serving_worker("d0", epoch=4, busy=3) as (busy, told_busy),
        serving_worker("d1", epoch=5) as (idle, told_idle),
        serving(router := told_router(1, worker("p0", (P,)), told_busy, told_idle)),
    ):
        scene = Scene(router, MemoryPlatform(prefill=1, decode=2))
        await scene.rounds(2, requests=1)
        done = await scene.parts.roles.flip(Flip(DECODE, PREFILL, 1), await scene.pools())
        assert done.problem is None and done.workers == ("d1",)
        assert done.pools.num_own(PREFILL, 2) == 1 and done.pools.num_own(DECODE, 1) == 2, "nobody is started or stopped for it"
        assert [list(request.roles) for request in idle.asked] == [[P]] and not busy.asked
        await scene.loop.close()


async def test_a_worker_that_restarted_keeps_its_roles() -> None:
    async with serving_worker("d0", epoch=4) as (told, seen), serving(router := told_router(1, worker("p0", (P,)), seen)):
        scene = Scene(router, MemoryPlatform())
        await scene.rounds(1)
        told.info = type(told.info)(worker_id="d0", epoch=5)
        done = await scene.parts.roles.flip(Flip(DECODE, PREFILL, 1), await scene.pools())
        assert done.problem == "d0 has just restarted" and not done.workers and not told.asked
        await scene.loop.close()


async def test_a_dry_run_says_what_it_would_do_and_does_nothing() -> None:
    said: list[str] = []
    async with serving(router := usual_router()):
        scene = Scene(router, MemoryPlatform())
        dry = DryRunPlatform(lambda: scene.parts.collector.workers, said.append)
        parts = dataclasses.replace(scene.parts, platform=dry, roles=DryRunRoles(said.append))
        scene.loop = Loop(parts, LoopSettings())
        await scene.rounds(5, requests=80)
        assert any(text.startswith("would ask for ") and "requests/s" in text for text in said)
        assert len(said) == len(set(said)), "each once"
        await scene.loop.close()
