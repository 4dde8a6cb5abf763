"""Rounds against routers and workers on real sockets: what is decided is done, what fails holds, what is silent is not idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from autoscaler.collect import Collector
from autoscaler.collect_pools import Pools
from autoscaler.config import AutoscalerConfig, goals_of, objective_of
from autoscaler.decision import Decision, Flip, PoolDecision
from autoscaler.dry_run import DryRunPlatform, DryRunRoles
from autoscaler.forecast import State
from autoscaler.loop import Loop, LoopSettings, Parts
from autoscaler.loop_history import Entry, Held, History, append_to, read_entries
from autoscaler.loop_restraint import FailedStarts, restrained
from autoscaler.platform import Asked, PlatformError
from autoscaler.policy import Policy
from autoscaler.roles import RoleChanger
from autoscaler.settings import AutoscalerSettings
from autoscaler.views import PoolName
from runtime.config import ConfigError
from tests.autoscaler.collected import D, P, worker
from tests.autoscaler.routers import ToldRouter, serving, serving_worker, told_router
from tests.autoscaler.scenes import GOALS

PREFILL, DECODE = PoolName.PREFILL, PoolName.DECODE
SETTINGS = AutoscalerSettings(forecast="last", forecast_sigmas=0.0, flips=False, stale_after_s=6.0, cool_down_s=30.0)


class MemoryPlatform:
    """Remembers what it is asked for."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.asked = {PREFILL: prefill, DECODE: decode}
        self.scaled: list[tuple[PoolName, int, str]] = []
        self.saved: State | None = None
        self.broken: str = ""
        self.is_leader = True

    async def leads(self, now_s: float) -> bool:
        return self.is_leader

    async def observe(self, now_s: float) -> Mapping[PoolName, Asked]:
        return {name: Asked(replicas) for name, replicas in self.asked.items()}

    async def scale(self, decision: PoolDecision, replicas: int, now_s: float) -> None:
        if self.broken:
            raise PlatformError(self.broken)
        self.scaled.append((decision.name, replicas, decision.reason))
        self.asked[decision.name] = replicas

    async def load(self) -> State | None:
        return self.saved

    async def save(self, state: State) -> None:
        self.saved = state

    async def close(self) -> None:
        pass


class Scene:
    """A loop whose clock the test turns."""

    def __init__(self, router: ToldRouter, platform: MemoryPlatform, settings: AutoscalerSettings = SETTINGS) -> None:
        self.now_s = 1000.0
        self.router, self.platform = router, platform
        self.decisions: list[Decision] = []
        self.parts = Parts(
            policy=Policy(settings, GOALS),
            collector=Collector([router.address], "m", window_s=10.0),
            platform=platform,
            roles=RoleChanger(drain_timeout_s=5.0),
            scaling=settings,
            on_decision=[lambda decision, now_s: self.decisions.append(decision)],
            clock=lambda: self.now_s,
        )
        self.loop = Loop(self.parts, LoopSettings())

    async def rounds(self, number: int, requests: int = 0) -> None:
        """Two seconds apart; so many requests come in each."""
        for _ in range(number):
            self.now_s += 2.0
            self.router.more(requests)
            await self.loop.round()

    async def pools(self) -> Pools:
        return Pools(await self.platform.observe(self.now_s), self.parts.collector.workers)

    def texts(self, kind: str) -> list[str]:
        return [entry.text for entry in self.loop.history.entries if entry.kind == kind]


def usual_router() -> ToldRouter:
    return told_router(1, worker("p0", (P,)), worker("d0", (D,)))


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


async def test_processes_behind_one_port_are_all_heard() -> None:
    routers = [told_router(epoch) for epoch in (1, 2)]
    for router in routers:
        router.status.num_processes = 2
    async with serving(*routers) as port:
        collector = Collector([f"127.0.0.1:{port}"], "m", window_s=10.0)
        for number in range(12):
            await collector.look(2.0 * number)
            for router in routers:
                router.more(3)
        seen = collector.traffic(24.0, 0.9)
        assert all(router.num_asked for router in routers)
        assert seen is not None and seen.rate_per_s == pytest.approx(3.0, rel=0.5), "three every two seconds at each of two"
        await collector.close()


async def test_names_are_resolved_and_keys_are_shown() -> None:
    async with serving(router := told_router(1, key="secret")) as port:
        shut_out = Collector([f"localhost:{port}"], "m", window_s=10.0)
        await shut_out.look(0.0)
        assert "does not let us in" in next(iter(shut_out.problems.values()))
        let_in = Collector([f"localhost:{port}"], "m", window_s=10.0, api_key="secret")
        await let_in.look(0.0)
        assert not let_in.problems and let_in.heard_s == 0.0
        nobody = Collector(["no-such-host.invalid:1"], "m", window_s=10.0)
        await nobody.look(0.0)
        assert "cannot be resolved" in nobody.problems["no-such-host.invalid:1"]
        other = Collector([router.address], "other", window_s=10.0, api_key="secret")
        await other.look(0.0)
        assert "nothing of the traffic of model 'other'; it tells of m" in other.problems[router.address]
        for collector in (shut_out, let_in, nobody, other):
            await collector.close()


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


def test_pools_whose_replicas_do_not_start_do_not_grow() -> None:
    decision = Decision((PoolDecision(PREFILL, 2, 2, "enough"), PoolDecision(DECODE, 2, 5, "more come")))
    kept = restrained(decision, {DECODE: FailedStarts(2, "2 have not started")})
    assert kept.replicas(DECODE) == 2 and "more come; but 2 have not started" in kept.reason
    assert restrained(decision, {}) == decision
    shrinking = Decision((PoolDecision(DECODE, 5, 1, "fewer come"),))
    assert restrained(shrinking, {DECODE: FailedStarts(2, "2 have not started")}) == shrinking
    lending = Decision((PoolDecision(PREFILL, 1, 2, "more come"),), (Flip(DECODE, PREFILL, 1),))
    assert restrained(lending, {PREFILL: FailedStarts(1, "1 has not started")}) == lending, "who changes roles need not start"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    history = History(append_to(tmp_path / "decisions.jsonl"))
    history.changed(1.0, "scale", "decode 1 → 2: more", {"decode": 2})
    history.held(2.0, Held("stale", "figures are 7 s old"), {})
    history.held(3.0, Held("stale", "figures are 9 s old"), {})
    history.held(4.0, None, {})
    kinds = ["scale", "hold", "resume"]
    assert [entry.kind for entry in history.entries] == kinds
    assert read_entries(tmp_path / "decisions.jsonl") == list(history.entries)
    assert read_entries(tmp_path / "decisions.jsonl")[0] == Entry(1.0, "scale", "decode 1 → 2: more", {"decode": 2})


def test_a_hold_is_said_when_it_begins_and_ends_however_it_is_worded() -> None:
    history = History()
    for now_s, what, text in (
        (0.0, "failed starts", "4 need 2, 1/s of it to drain the backlog"),
        (2.0, "failed starts", "4 need 2"),
        (30.0, "failed starts", "5 need 3, 2/s of it to drain the backlog"),
        (62.0, "failed starts", "5 need 3"),
        (64.0, "failed starts", "5 need 3, 2/s of it to drain the backlog"),
        (130.0, "failed starts", "6 need 3"),
        (140.0, "stale", "figures are 9 s old"),
        (150.0, "", ""),
        (152.0, "", ""),
    ):
        history.held(now_s, Held(what, text) if what else None, {})
    said = [(entry.at_s, entry.kind) for entry in history.entries]
    assert said == [(0.0, "hold"), (62.0, "hold"), (140.0, "hold"), (150.0, "resume")]


def test_a_failure_is_said_once_and_rarely_again() -> None:
    history = History()
    for now_s in range(0, 200, 2):
        history.failed(now_s, f"no quota; the next try is {now_s} s away" if now_s < 40 or now_s % 4 else None)
    assert [entry.at_s for entry in history.entries] == [0.0, 62.0, 122.0, 182.0]


def test_settings_name_what_is_wrong(tmp_path: Path) -> None:
    good = AutoscalerConfig(routers=("a:1",), objectives="file")
    good.validate()
    for changes, field in (
        ({"routers": ()}, "routers"),
        ({"routers": ("a",)}, "routers"),
        ({"objectives": ""}, "objectives"),
        ({"period_s": 0.0}, "period_s"),
        ({"window_s": 3.0}, "window_s"),
        ({"period_s": 4.0, "scaling": AutoscalerSettings(stale_after_s=5.0)}, r"scaling\.stale_after_s"),
        ({"api_key": "a b"}, "api_key"),
    ):
        with pytest.raises(ConfigError, match=f"^{field}: "):
            dataclasses.replace(good, **changes).validate()
    path = tmp_path / "objectives.toml"
    path.write_text("[a]\nttft_ms = 500\ntpot_ms = 40\nquantile = 0.3\n[b]\nttft_ms = 500\ntpot_ms = 40\n")
    with pytest.raises(ConfigError, match="names 2 models; give one of a, b"):
        objective_of(str(path), "")
    with pytest.raises(ConfigError, match=r"a\.quantile"):
        goals_of(objective_of(str(path), "a"), 10.0)
    assert goals_of(objective_of(str(path), "b"), 10.0).transit_s == 0.01
