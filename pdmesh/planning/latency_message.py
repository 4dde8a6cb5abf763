"""The latency model on the wire: what workers report, what routers and autoscalers make of it, and its names in the metrics that
gateways read."""

from __future__ import annotations

from pdmesh.planning.latency_model import MAX_PER_ROW, NO_DRAFTS, Drafts, LatencyModel
from pdmesh.v1 import worker_pb2

STEP_METRIC = "pdmesh:step_seconds"
STEP_PARTS = {
    "fixed": "fixed_s",
    "prefill_token": "per_prefill_token_s",
    "prefill_context": "per_prefill_context_s",
    "sequence": "per_sequence_s",
    "context_token": "per_context_token_s",
}
"""The metric's label `part`, and the field of LatencyModel that it is the name of, in the order of these."""


def latency_message(model: LatencyModel) -> worker_pb2.LatencyModel:
    """Return the message that reports `model`."""
    return worker_pb2.LatencyModel(
        fixed_s=model.fixed_s,
        per_prefill_token_s=model.per_prefill_token_s,
        per_prefill_context_s=model.per_prefill_context_s,
        per_sequence_s=model.per_sequence_s,
        per_context_token_s=model.per_context_token_s,
        num_steps=model.num_steps,
        prefill_error=model.prefill_error,
        decode_error=model.decode_error,
    )


def reported_latency(load: worker_pb2.LoadReport) -> LatencyModel | None:
    """Return the latency model in a report as it stands there, unchecked; None without one."""
    if not load.HasField("latency_model"):
        return None
    told = load.latency_model
    return LatencyModel(
        told.fixed_s,
        told.per_prefill_token_s,
        told.per_prefill_context_s,
        told.per_sequence_s,
        told.per_context_token_s,
        told.num_steps,
        told.prefill_error,
        told.decode_error,
    )


def reported_drafts(load: worker_pb2.LoadReport) -> Drafts:
    """Return what speculation does lately by a report; none, where the report says nothing, or what cannot be: more tokens are
    kept than were computed."""
    if not load.HasField("speculation"):
        return NO_DRAFTS
    tokens, computed = load.speculation.tokens_per_row, load.speculation.computed_per_row
    return Drafts(tokens, computed) if 1 <= tokens <= computed <= MAX_PER_ROW else NO_DRAFTS
