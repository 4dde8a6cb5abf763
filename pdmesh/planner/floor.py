"""What no number of workers can better: requests alone on workers that do nothing else. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.planner.meshes import WorkerKind
from pdmesh.planner.traffic import Traffic
from pdmesh.simulator.settings import MeshSettings


@dataclass(frozen=True)
class Floor:
    """Of one kind of worker. `attainable`: the share of requests that keep both objectives with nobody beside them; the rest is
    at the objectives' quantile: TTFT and TPOT in seconds, and the lengths that they come from, in tokens."""

    kind: WorkerKind
    attainable: float
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    context_tokens: int


def floor_of(kind: WorkerKind, traffic: Traffic, settings: MeshSettings, quantile: float) -> Floor:
    """`settings` has the objectives and the way between processes."""
    goal = settings.objective
    assert goal is not None
    transit_s = settings.router_s + 2 * settings.call_s
    speed, chunk = kind.spec.speed, kind.spec.max_num_batched_tokens
    pairs = list(zip(traffic.arrivals, traffic.uncached, strict=True))
    ttfts = [transit_s + speed.prefill_s(a.num_input - own, a.num_input, chunk=chunk) for a, own in pairs]
    contexts = [a.num_input + a.num_output // 2 if a.num_output > 1 else 0 for a, _ in pairs]
    tpots = [speed.decode_s(1, context) if context else 0.0 for context in contexts]
    num_kept = sum(t <= goal.ttft_ms / 1e3 and p <= goal.tpot_ms / 1e3 for t, p in zip(ttfts, tpots, strict=True))
    return Floor(
        kind,
        num_kept / len(pairs),
        _quantile(ttfts, quantile),
        _quantile(tpots, quantile),
        int(_quantile([own for _, own in pairs], quantile)),
        int(_quantile(contexts, quantile)),
    )


def why_impossible(floor: Floor, settings: MeshSettings, quantile: float) -> str:
    """In words, for the kind of worker that comes closest."""
    goal, share = settings.objective, f"{100 * quantile:g} %"
    assert goal is not None
    reasons = []
    if floor.ttft_s * 1e3 > goal.ttft_ms:
        parts = _parts(floor.kind, floor.prompt_tokens, 0)
        reasons.append(f"a prompt of {floor.prompt_tokens} tokens takes {floor.ttft_s * 1e3:.0f} ms to its first token, {parts}")
    if floor.tpot_s * 1e3 > goal.tpot_ms:
        parts = _parts(floor.kind, 0, floor.context_tokens)
        reasons.append(f"a token behind {floor.context_tokens} others takes {floor.tpot_s * 1e3:.1f} ms, {parts}")
    if not reasons:
        reasons.append("each objective by itself is missed by too many")
    return (
        f"no number of workers keeps TTFT {goal.ttft_ms} ms and TPOT {goal.tpot_ms} ms for {share} of these requests: alone on "
        f"an idle worker ({floor.kind.name}) {100 * floor.attainable:.1f} % do; at the {share} mark " + ", and ".join(reasons)
    )


def closest(kinds: Sequence[WorkerKind], traffic: Traffic, settings: MeshSettings, quantile: float) -> Floor:
    """Of the first kind that keeps the objectives; of the one that comes closest, where none does."""
    floors = []
    for kind in kinds:
        floors.append(floor_of(kind, traffic, settings, quantile))
        if floors[-1].attainable >= quantile:
            break
    return max(floors, key=lambda floor: (floor.attainable, -floor.ttft_s, -floor.tpot_s))


def _parts(kind: WorkerKind, num_prompt: int, context: int) -> str:
    """What takes the time, the longest first."""
    if kind.roofline is None:
        return "as measured"
    parts = kind.roofline.decode_parts(1, context) if context else kind.roofline.prefill_parts(num_prompt)
    named = sorted(parts.items(), key=lambda part: -part[1])
    return "of which " + ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in named[:2])


def _quantile(values: Sequence[float], share: float) -> float:
    """The least that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
