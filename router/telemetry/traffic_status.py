"""What was counted of the traffic, as clients ask for it."""

from collections.abc import Mapping

from pdmesh.v1 import mesh_pb2
from router.telemetry.traffic import ModelTraffic, Traffic


def traffic_status(traffic: Traffic, now: float) -> list[mesh_pb2.TrafficStatus]:
    """Of each model, also of one that nobody has asked for."""
    return [_of_model(model, counted, now) for model, counted in traffic.models.items()]


def _of_model(model: str, counted: ModelTraffic, now: float) -> mesh_pb2.TrafficStatus:
    return mesh_pb2.TrafficStatus(
        model=model,
        up_ms=max(0, round((now - counted.began) * 1000)),
        num_arrived=counted.inputs.count,
        input_tokens=counted.inputs.total,
        input_squared=counted.inputs.squared,
        num_gaps=counted.gaps.count,
        gaps_s=counted.gaps.total,
        gaps_squared=counted.gaps.squared,
        num_answered=counted.outputs.count,
        output_tokens=counted.outputs.total,
        output_squared=counted.outputs.squared,
        answered_input_tokens=counted.answered_inputs,
        cached_tokens=counted.cached_tokens,
        num_queued=counted.num_queued,
        queue_wait_ms=round(counted.queue_wait_s(now) * 1000),
        num_refused=counted.num_refused,
        ttft_observed=_histogram(counted.ttft.observed),
        ttft_predicted=_histogram(counted.ttft.predicted),
        tpot_observed=_histogram(counted.tpot.observed),
        tpot_predicted=_histogram(counted.tpot.predicted),
    )


def _histogram(counts: Mapping[int, int]) -> mesh_pb2.DurationHistogram:
    if not counts:
        return mesh_pb2.DurationHistogram()
    first, last = min(counts), max(counts)
    return mesh_pb2.DurationHistogram(first=first, counts=[counts.get(number, 0) for number in range(first, last + 1)])
