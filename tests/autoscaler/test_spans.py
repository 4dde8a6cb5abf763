"""What a loop's decisions leave at a collector: a trace for each that changes something, and none for the others."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise

from pdmesh.autoscaler.loop_history import NAME, DecisionSpans
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.tracing import Tracing, open_tracing
from tests.autoscaler.loop_scene import SETTINGS, MemoryPlatform, Scene, usual_router
from tests.autoscaler.routers import serving
from tests.support.otlp_receiver import OtlpReceiver, Received


def traced(scene: Scene, receiver: OtlpReceiver) -> Tracing:
    """However few requests' traces are sent."""
    tracing = open_tracing(TelemetryConfig(otlp_endpoint=receiver.endpoint, trace_share=0), "pdmesh-autoscaler", {}, {})
    scene.parts.spans = DecisionSpans(tracing)
    return tracing


async def sent(tracing: Tracing, receiver: OtlpReceiver) -> list[Received]:
    """All of them."""
    await asyncio.to_thread(tracing.close, 10)
    return receiver.spans


async def test_growth_is_a_trace_with_its_reasons_and_orders() -> None:
    with OtlpReceiver() as receiver:
        async with serving(router := usual_router()):
            scene = Scene(router, MemoryPlatform())
            tracing = traced(scene, receiver)
            await scene.rounds(5, requests=60)
            await scene.loop.close()
        spans = await sent(tracing, receiver)
    assert {span.name for span in spans} == {NAME} and {span.parent_id for span in spans} == {""}
    assert len({span.trace_id for span in spans}) == len(spans) < 5
    orders = [event for span in spans for event in span.events if event.name == "scale"]
    told = [(event.attributes["pdmesh.autoscale.pool"], event.attributes["pdmesh.autoscale.asked"]) for event in orders]
    assert told == [(name.value, replicas) for name, replicas, _ in scene.platform.scaled] != []
    first, reasons = spans[0], scene.platform.scaled[0]
    assert first.attributes[f"pdmesh.autoscale.{reasons[0].value}.reason"] == reasons[2]
    assert first.attributes["pdmesh.autoscale.prefill.before"] == 1 and not first.is_failed
    assert first.resource["service.name"] == "pdmesh-autoscaler"
    assert first.start_ns < first.events[0].at_ns <= orders[0].at_ns <= first.end_ns


async def test_rounds_that_change_nothing_leave_no_trace() -> None:
    with OtlpReceiver() as receiver:
        async with serving(router := usual_router()):
            scene = Scene(router, MemoryPlatform(), dataclasses.replace(SETTINGS, cool_down_s=600.0))
            tracing = traced(scene, receiver)
            await scene.rounds(8)
            await scene.loop.close()
        assert len(scene.decisions) > 3 and await sent(tracing, receiver) == []


async def test_what_fails_is_told_once_until_it_works() -> None:
    platform = MemoryPlatform()
    platform.broken = "the API server is down"
    with OtlpReceiver() as receiver:
        async with serving(router := usual_router()):
            scene = Scene(router, platform)
            tracing = traced(scene, receiver)
            await scene.rounds(6, requests=60)
            platform.broken = ""
            await scene.rounds(1, requests=60)
            await scene.loop.close()
        failed, *done = await sent(tracing, receiver)
    assert (failed.is_failed, failed.problem) == (True, "the API server is down")
    assert failed.attributes["error.type"] == "PlatformError"
    assert [(span.is_failed, {event.name for event in span.events}) for span in done] == [(False, {"decided", "scale"})]


async def test_orders_that_nobody_carries_out_are_told_once() -> None:
    """As in a dry run: the same is wanted again in each round."""

    class Deaf(MemoryPlatform):
        async def scale(self, *_: object) -> None:
            """Nothing comes of it."""

    with OtlpReceiver() as receiver:
        async with serving(router := usual_router()):
            scene = Scene(router, Deaf())
            tracing = traced(scene, receiver)
            await scene.rounds(8, requests=60)
            await scene.loop.close()
        spans = await sent(tracing, receiver)
    asked = [[event.attributes for event in span.events[1:]] for span in spans]
    assert asked and all(one != other for one, other in pairwise(asked)) and len(asked) < 6
