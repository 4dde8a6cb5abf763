"""What a plan means, in words: what takes the time, what would go wrong first, what does not run yet. Pure."""

from __future__ import annotations

from pdmesh.planner.meshes import Point, WorkerKind
from pdmesh.planner.plan import Plan
from pdmesh.planner.trial import Outcome
from pdmesh.planning.devices import Device

KV_FULL = 0.8
_BY = {
    "products": "compute",
    "reading weights": "memory bandwidth",
    "reading KV": "memory bandwidth",
    "attention": "compute",
    "all-reduce": "the link between devices",
    "overhead": "what the engine does besides",
    "an empty step": "what every step takes",
    "sequences": "the number of sequences",
    "contexts": "reading KV",
    "tokens": "compute",
}


def decode_limit(plan: Plan) -> str:
    """What a typical step of a decode worker consists of, and how full its KV is."""
    kind, batch = plan.chosen.point.shape.decode, max(1.0, plan.expected.batch)
    context = plan.task.traffic.load.lengths.running_context
    parts = _decode_parts(kind, batch, context)
    kv_share = batch * context / kv_room(kind)
    shares = _shares(parts)
    limit = _BY[max(parts, key=lambda name: parts[name])]
    if kv_share > KV_FULL:
        limit = "room for KV"
    took_ms, rows = 1e3 * sum(parts.values()), f"{batch:.0f} sequence{'s' if round(batch) > 1 else ''}"
    return f"a step of {rows} takes {took_ms:.1f} ms ({shares}); KV {kv_share:.0%} full: {limit} limits it"


def prefill_limit(plan: Plan) -> str:
    """What a typical prompt takes on a worker that computes prompts."""
    shape = plan.chosen.point.shape
    kind = shape.prefill or shape.decode
    num_tokens = int(plan.task.traffic.load.lengths.input_tokens)
    parts = _prefill_parts(kind, num_tokens)
    seconds = sum(parts.values())
    limit = _BY[max(parts, key=lambda name: parts[name])]
    return f"a prompt of {num_tokens} tokens takes {1e3 * seconds:.1f} ms ({_shares(parts)}): {limit} limits it"


def kv_room(kind: WorkerKind) -> int:
    """Tokens."""
    return max(1, kind.kv_tokens)


def misses(outcome: Outcome) -> str:
    """What went wrong, the most frequent first."""
    named = {"too late": outcome.late, "too slow": outcome.slow, "refused, as they would have been late": outcome.refused}
    parts = [f"{share:.2%} {name}" for name, share in sorted(named.items(), key=lambda part: -part[1]) if share > 0]
    return ", ".join(parts) or "nothing was missed"


def why_not_deployable(point: Point, device: Device | None, weights: str) -> str | None:
    """What of it pdmesh does not run today; None: it runs. `device` None: what was measured, which runs."""
    if point.shape.decode.num_devices > 1 or (point.shape.prefill is not None and point.shape.prefill.num_devices > 1):
        return "tensor parallelism over several GPUs is untried yet"
    if device is not None and device.is_gpu and point.shape.prefill is not None:
        return "the hand-off of KV between GPUs is untried yet, so prefill and decode cannot be separated there"
    if device is not None and device.is_gpu and weights not in ("bfloat16", "float16", "float32"):
        return f"{weights} weights are untried on GPUs yet"
    return None


def _decode_parts(kind: WorkerKind, batch: float, context: float) -> dict[str, float]:
    if kind.roofline is not None:
        return kind.roofline.decode_parts(batch, context)
    speed = kind.spec.speed
    rows, contexts = speed.per_sequence_s * batch, speed.per_context_token_s * batch * context
    return {"an empty step": speed.fixed_s, "sequences": rows, "contexts": contexts}


def _prefill_parts(kind: WorkerKind, num_tokens: int) -> dict[str, float]:
    speed, chunk = kind.spec.speed, kind.spec.max_num_batched_tokens
    num_steps = -(-num_tokens // chunk)
    if kind.roofline is not None:
        first = kind.roofline.prefill_parts(num_tokens)
        more = (num_steps - 1) * kind.roofline.overhead_s
        return {**first, "overhead": first["overhead"] + more}
    attention_s = speed.per_prefill_context_s * num_tokens * (num_tokens + 1) / 2
    return {
        "an empty step": num_steps * speed.fixed_s,
        "tokens": speed.per_prefill_token_s * num_tokens,
        "attention": attention_s,
    }


def _shares(parts: dict[str, float]) -> str:
    """Of at least a hundredth, the longest first."""
    total = sum(parts.values())
    named = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in named if seconds >= 0.01 * total)
