"""Formats a plan as lines for a terminal, and as numbers for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pdmesh.loadtest.record import Objectives
from pdmesh.planner.meshes import Point, WorkerKind
from pdmesh.planner.plan import Plan, Tried
from pdmesh.planner.traffic import Subject
from pdmesh.planner.trial import Outcome
from pdmesh.planning.devices import Device
from pdmesh.terminal import table

# The plan in words: what takes the time, which limit is reached first, what does not run yet.


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
    """Return the parts of a typical step of a decode worker, and how full its KV is."""
    kind, batch = plan.chosen.point.shape.decode, max(1.0, plan.expected.batch)
    context = plan.task.traffic.load.lengths.running_context
    parts = _decode_parts(kind, batch, context)
    kv_share = batch * context / kv_room(kind)
    shares = _shares(parts)
    limit = _BY[max(parts, key=lambda name: parts[name])]
    if kv_share > KV_FULL:
        limit = "room for KV"
    took_ms, rows = 1e3 * sum(parts.values()), f"{batch:.0f} sequence{'s' if round(batch) > 1 else ''}"
    drafted = _drafted(kind, batch, sum(parts.values()))
    return f"a step of {rows} takes {took_ms:.1f} ms ({shares}){drafted}; KV {kv_share:.0%} full: {limit} limits it"


def _drafted(kind: WorkerKind, batch: float, step_s: float) -> str:
    """Return what speculation makes of a step of decoding sequences."""
    drafts, speed = kind.spec.drafts, kind.spec.speed
    if not drafts.pay(speed, batch, step_s):
        return ", without drafts: they would not pay" if drafts.tokens_per_row > 1 else ""
    return f", {1e3 * drafts.added_s(speed, batch):.1f} more with drafts for {drafts.tokens_per_row:.2f} tokens of each"


def prefill_limit(plan: Plan) -> str:
    """Return the time of a typical prompt on a worker that computes prompts."""
    shape = plan.chosen.point.shape
    kind = shape.prefill or shape.decode
    num_tokens = int(plan.task.traffic.load.lengths.input_tokens)
    parts = _prefill_parts(kind, num_tokens)
    seconds = sum(parts.values())
    limit = _BY[max(parts, key=lambda name: parts[name])]
    return f"a prompt of {num_tokens} tokens takes {1e3 * seconds:.1f} ms ({_shares(parts)}): {limit} limits it"


def kv_room(kind: WorkerKind) -> int:
    """Return the KV capacity in tokens."""
    return max(1, kind.kv_tokens)


def misses(outcome: Outcome) -> str:
    """Return the failures, the most frequent first."""
    named = {"too late": outcome.late, "too slow": outcome.slow, "refused, as they would have been late": outcome.refused}
    parts = [f"{share:.2%} {name}" for name, share in sorted(named.items(), key=lambda part: -part[1]) if share > 0]
    return ", ".join(parts) or "nothing was missed"


def why_not_deployable(point: Point, device: Device | None, weights: str) -> str | None:
    """Return what of it pdmesh does not run today; None: it runs. `device` None: a measured worker, which runs."""
    if point.shape.decode.num_devices > 1 or (point.shape.prefill is not None and point.shape.prefill.num_devices > 1):
        return "tensor parallelism over several GPUs is not tested yet"
    if device is not None and device.is_gpu and point.shape.prefill is not None:
        return "the KV hand-off between GPUs is not tested yet, so prefill and decode cannot be separated there"
    if device is not None and device.is_gpu and weights not in ("bfloat16", "float16", "float32"):
        return f"{weights} weights are not tested on GPUs yet"
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
    """Return the parts of at least a hundredth, longest first."""
    total = sum(parts.values())
    named = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in named if seconds >= 0.01 * total)


WIDTH = 130
_LATENCIES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
_HEAD = ("ATTAINED", "TTFT P50", "P99", "TPOT P50", "P99")


def lines(plan: Plan, subject: Subject) -> list[RenderableType]:
    """Return the whole page, for a console of `WIDTH` columns."""
    return [*_asked(plan, subject), "", *_chosen(plan, subject), "", _others(plan, subject), "", *_notes(plan, subject)]


def objectives(plan: Plan) -> str:
    """Return the objectives in the words of the load test."""
    goal = plan.task.settings.objective
    assert goal is not None
    return str(Objectives(ttft_ms=goal.ttft_ms, tpot_ms=goal.tpot_ms, quantile=plan.task.quantile))


def mesh_name(point: Point) -> str:
    """Return the mesh's name with its kind."""
    return f"{point.name} (separated)" if point.shape.prefill else f"{point.name} aggregated"


def cost(point: Point, subject: Subject) -> str:
    """Return devices, and their price."""
    price = subject.money.of(point.cost)
    unit = subject.unit if point.cost != 1 else subject.unit.removesuffix("s")
    return f"{point.cost} {unit}" + (f", {price:.2f} an hour" if price is not None else "")


def rows(plan: Plan) -> list[Tried]:
    """Return every mesh that was simulated to the end, cheapest first."""
    return sorted(plan.seen, key=lambda tried: (tried.point.cost, tried.point.shape.mesh, -tried.outcome.attainment))


def cells(outcome: Outcome) -> tuple[str, ...]:
    """Return attainment and latencies, in milliseconds."""
    return (f"{outcome.attainment:.2%}", *(f"{1e3 * getattr(outcome, name):.1f}" for name in _LATENCIES))


def as_json(plan: Plan, subject: Subject) -> dict[str, object]:
    """Return all of it, for programs. Durations in seconds."""
    goal = plan.task.settings.objective
    assert goal is not None
    return {
        "model": subject.model,
        "device": subject.device.name if subject.device else None,
        "speed": subject.speed or None,
        "load": subject.load,
        "objectives": {"ttft_ms": goal.ttft_ms, "tpot_ms": goal.tpot_ms, "quantile": plan.task.quantile},
        "headroom": plan.task.headroom,
        "chosen": {**_mesh(plan.chosen.point, subject), "planned": vars(plan.chosen.outcome), "expected": vars(plan.expected)},
        "seen": [{**_mesh(tried.point, subject), **vars(tried.outcome)} for tried in rows(plan)],
        "num_simulations": plan.num_runs,
        "num_requests": plan.num_requests,
        "ended_early": plan.is_spent,
        "not_deployable": why_not_deployable(plan.chosen.point, subject.device, subject.weights),
        "notes": list(subject.notes),
    }


def _asked(plan: Plan, subject: Subject) -> list[str]:
    traffic, lengths = plan.task.traffic, plan.task.traffic.load.lengths
    return [
        subject.title,
        f"{len(traffic.arrivals)} requests, {subject.load}: {traffic.rate_per_s:.3g}/s, "
        f"prompts of {lengths.input_tokens:.0f} and outputs of {lengths.output_tokens:.0f} tokens on average",
        f"objectives: {objectives(plan)}; {plan.task.headroom:.0%} headroom",
    ]


def _chosen(plan: Plan, subject: Subject) -> list[RenderableType]:
    point, shape = plan.chosen.point, plan.chosen.point.shape
    traffic = plan.task.traffic
    per_million = subject.money.per_million(point.cost, traffic.num_output_tokens / traffic.duration_s)
    price = f", {per_million:.2f} for a million output tokens" if per_million is not None else ""
    found: list[RenderableType] = [Text(f"chosen: {mesh_name(point)}: {cost(point, subject)}{price}", "bold")]
    if shape.prefill is not None:
        found.append(f"  prefill  {shape.prefill.name}: {prefill_limit(plan)}")
        found.append(f"  decode   {shape.decode.name}: {decode_limit(plan)}")
    else:
        found += [
            f"  each     {shape.decode.name}",
            f"  prompts  {prefill_limit(plan)}",
            f"  decode   {decode_limit(plan)}",
        ]
    return [*found, "", *_expected(plan)]


def _expected(plan: Plan) -> list[RenderableType]:
    found = [("the load as it is", *cells(plan.expected))]
    if plan.task.headroom:
        found.append((f"{1 + plan.task.headroom:g} times the load", *cells(plan.chosen.outcome)))
    if plan.fewer is not None:
        found.append((f"with {plan.fewer.point.name} instead", *cells(plan.fewer.outcome)))
    missed = misses((plan.fewer or plan.chosen).outcome)
    return [table(("ms", *_HEAD), found), f"{'a worker less would miss' if plan.fewer else 'missed'}: {missed}"]


def _others(plan: Plan, subject: Subject) -> Table:
    head = ("MESH", subject.unit.upper(), *(("PRICE/h",) if subject.money.per_hour is not None else ()), *_HEAD, "EACH WORKER")
    return table(head, [_row(tried, plan, subject) for tried in rows(plan)])


def _row(tried: Tried, plan: Plan, subject: Subject) -> Sequence[str]:
    point = tried.point
    price = subject.money.of(point.cost)
    kinds = [point.shape.decode.name] if point.shape.prefill is None else [point.shape.prefill.name, point.shape.decode.name]
    mark = "* " if point == plan.chosen.point else "  "
    priced = () if price is None else (f"{price:.2f}",)
    return (mark + mesh_name(point), str(point.cost), *priced, *cells(tried.outcome), " | ".join(kinds))


def _notes(plan: Plan, subject: Subject) -> list[str]:
    notes = [subject.assumed, *subject.notes]
    problem = why_not_deployable(plan.chosen.point, subject.device, subject.weights)
    if problem is not None:
        notes.append(f"pdmesh does not run the chosen mesh today: {problem}; --deployable plans with what it runs")
    if plan.is_spent:
        notes.append("the search ended before all was tried; a higher --effort may find a cheaper mesh")
    notes.append(f"{plan.num_runs} simulations of {plan.num_requests} requests; * is the chosen mesh")
    return notes


def _mesh(point: Point, subject: Subject) -> dict[str, object]:
    decode, prefill = point.shape.decode, point.shape.prefill
    pools = {"decode": (decode, point.size.num_decode), **({"prefill": (prefill, point.size.num_prefill)} if prefill else {})}
    return {
        "mesh": point.shape.mesh,
        "devices": point.cost,
        "price_per_hour": subject.money.of(point.cost),
        **{
            name: {
                "replicas": num,
                "tensor_parallel": kind.num_devices,
                "max_num_seqs": kind.spec.max_num_seqs,
                "max_num_batched_tokens": kind.spec.max_num_batched_tokens,
            }
            for name, (kind, num) in pools.items()
        },
    }
