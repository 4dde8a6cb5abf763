"""A plan as lines for a terminal, and as numbers for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.loadtest.objectives import Objectives
from pdmesh.planner import words
from pdmesh.planner.meshes import Point
from pdmesh.planner.plan import Plan, Tried
from pdmesh.planner.subject import Subject
from pdmesh.planner.trial import Outcome
from pdmesh.terminal import Palette, table

_LATENCIES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
_HEAD = ("ATTAINED", "TTFT P50", "P99", "TPOT P50", "P99")


def lines(plan: Plan, subject: Subject, colours: Palette) -> list[str]:
    """The whole page."""
    return [*_asked(plan, subject), "", *_chosen(plan, subject, colours), "", *_others(plan, subject), "", *_notes(plan, subject)]


def objectives(plan: Plan) -> str:
    """In the words of the load test."""
    goal = plan.task.settings.objective
    assert goal is not None
    return str(Objectives(ttft_ms=goal.ttft_ms, tpot_ms=goal.tpot_ms, quantile=plan.task.quantile))


def mesh_name(point: Point) -> str:
    """With the kind of mesh."""
    return f"{point.name} (separated)" if point.shape.prefill else f"{point.name} aggregated"


def cost(point: Point, subject: Subject) -> str:
    """Devices, and their price."""
    price = subject.money.of(point.cost)
    unit = subject.unit if point.cost != 1 else subject.unit.removesuffix("s")
    return f"{point.cost} {unit}" + (f", {price:.2f} an hour" if price is not None else "")


def rows(plan: Plan) -> list[Tried]:
    """Every mesh that was simulated to the end, cheapest first."""
    return sorted(plan.seen, key=lambda tried: (tried.point.cost, tried.point.shape.mesh, -tried.outcome.attainment))


def cells(outcome: Outcome) -> tuple[str, ...]:
    """Attainment and latencies, in milliseconds."""
    return (f"{outcome.attainment:.2%}", *(f"{1e3 * getattr(outcome, name):.1f}" for name in _LATENCIES))


def as_json(plan: Plan, subject: Subject) -> dict[str, object]:
    """All of it, for programs. Durations in seconds."""
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
        "not_deployable": words.why_not_deployable(plan.chosen.point, subject.device, subject.weights),
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


def _chosen(plan: Plan, subject: Subject, colours: Palette) -> list[str]:
    point, shape = plan.chosen.point, plan.chosen.point.shape
    traffic = plan.task.traffic
    per_million = subject.money.per_million(point.cost, traffic.num_output_tokens / traffic.duration_s)
    price = f", {per_million:.2f} for a million output tokens" if per_million is not None else ""
    found = [colours.bold(f"chosen: {mesh_name(point)}: {cost(point, subject)}{price}")]
    if shape.prefill is not None:
        found.append(f"  prefill  {shape.prefill.name}: {words.prefill_limit(plan)}")
        found.append(f"  decode   {shape.decode.name}: {words.decode_limit(plan)}")
    else:
        found += [
            f"  each     {shape.decode.name}",
            f"  prompts  {words.prefill_limit(plan)}",
            f"  decode   {words.decode_limit(plan)}",
        ]
    return [*found, "", *_expected(plan)]


def _expected(plan: Plan) -> list[str]:
    found = [("the load as it is", *cells(plan.expected))]
    if plan.task.headroom:
        found.append((f"{1 + plan.task.headroom:g} times the load", *cells(plan.chosen.outcome)))
    if plan.fewer is not None:
        found.append((f"with {plan.fewer.point.name} instead", *cells(plan.fewer.outcome)))
    shown = table(("ms", *_HEAD), found)
    missed = words.misses((plan.fewer or plan.chosen).outcome)
    return [*shown, f"{'a worker less would miss' if plan.fewer else 'missed'}: {missed}"]


def _others(plan: Plan, subject: Subject) -> list[str]:
    head = ("MESH", subject.unit.upper(), *(("PRICE/h",) if subject.money.per_hour is not None else ()), *_HEAD, "EACH WORKER")
    return table(head, [_row(tried, plan, subject) for tried in rows(plan)], max_width=130)


def _row(tried: Tried, plan: Plan, subject: Subject) -> Sequence[str]:
    point = tried.point
    price = subject.money.of(point.cost)
    kinds = [point.shape.decode.name] if point.shape.prefill is None else [point.shape.prefill.name, point.shape.decode.name]
    mark = "* " if point == plan.chosen.point else "  "
    priced = () if price is None else (f"{price:.2f}",)
    return (mark + mesh_name(point), str(point.cost), *priced, *cells(tried.outcome), " | ".join(kinds))


def _notes(plan: Plan, subject: Subject) -> list[str]:
    notes = [subject.assumed, *subject.notes]
    problem = words.why_not_deployable(plan.chosen.point, subject.device, subject.weights)
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
