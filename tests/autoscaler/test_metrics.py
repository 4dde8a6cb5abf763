"""What a loop against routers on real sockets shows."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from pdmesh.autoscaler import metrics
from pdmesh.autoscaler.loop_history import History
from pdmesh.autoscaler.metrics import AutoscalerMetrics, hold_name
from pdmesh.autoscaler.settings import PoolSettings
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.open_metrics import open_metrics
from tests.autoscaler.loop_scene import SETTINGS, MemoryPlatform, Scene, usual_router
from tests.autoscaler.routers import serving
from tests.runtime.telemetry.scrape import Page, scrape


class Shown:
    """A scene's metrics on a port."""

    def __init__(self, scene: Scene) -> None:
        self.metrics = AutoscalerMetrics(open_metrics(TelemetryConfig(metrics_port=0), "a", {}, {}, host="127.0.0.1"))
        scene.parts.history = History(self.metrics.happened)
        scene.parts.on_decision.append(self.metrics.decided)
        self.metrics.watch(scene.loop)

    async def look(self) -> Page:
        """As of now; the port is closed."""
        page = await asyncio.to_thread(scrape, await self.metrics.metrics.start())
        await self.metrics.metrics.stop()
        return page


async def test_growth_is_wanted_decided_and_done() -> None:
    platform = MemoryPlatform()
    async with serving(router := usual_router()):
        scene = Scene(router, platform)
        shown = Shown(scene)
        await scene.rounds(5, requests=60)
        page = await shown.look()
        await scene.loop.close()
    wanted = {name.value: page.value("pdmesh_autoscaler_wanted", pool=name.value) for name in platform.asked}
    assert wanted == {name.value: number for name, number in platform.asked.items()}
    assert page.value("pdmesh_autoscaler_decisions_total", change="up") >= 1
    assert page.value("pdmesh_autoscaler_events_total", kind="scale") == len(scene.texts("scale"))
    assert page.value("pdmesh_autoscaler_ready", pool="prefill") == 1
    assert page.value("pdmesh_autoscaler_forecast", what="mean") > 10
    assert page.value("pdmesh_autoscaler_leader") == 1


async def test_silence_is_held_and_failed_starts_are_counted() -> None:
    quick = PoolSettings(start_s=2.0)
    settings = dataclasses.replace(SETTINGS, prefill=quick, decode=quick, cool_down_s=600.0, zero_after_s=600.0)
    async with serving(router := usual_router()):
        scene = Scene(router, MemoryPlatform(decode=2), settings)
        shown = Shown(scene)
        await scene.rounds(17)
        router.hang = True
        scene.now_s += 20.0
        await scene.loop.round()
        page = await shown.look()
        await scene.loop.close()
    assert page.value("pdmesh_autoscaler_failed_starts", pool="decode") == 1
    assert page.value("pdmesh_autoscaler_held", reason="stale") == 1
    assert page.value("pdmesh_autoscaler_decisions_total", change="stay", held="stale") >= 1
    assert page.value("pdmesh_autoscaler_events_total", kind="hold") == 1


async def test_all_of_the_catalogue_is_shown() -> None:
    """But flips, of which there are none."""
    async with serving(router := usual_router()):
        scene = Scene(router, MemoryPlatform())
        shown = Shown(scene)
        await scene.rounds(5, requests=60)
        names = {sample.name for sample in (await shown.look()).samples}
        await scene.loop.close()
    for instrument in set(metrics.ALL) - {metrics.FLIPPED}:
        assert set(instrument.samples) <= names, instrument.name


@pytest.mark.parametrize(
    ("held", "name"),
    [(None, ""), ("grew 3 s ago", "grew"), ("step of 4", "step"), ("set by kubectl", "set by"), ("an outage of Redis", "hold")],
)
def test_holds_have_few_names(held: str | None, name: str) -> None:
    assert hold_name(held) == name
