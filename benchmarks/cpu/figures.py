"""From measured medians to figures with their goals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.cpu.cases import Plan, decode_case, prefill_case
from benchmarks.cpu.limits import BF16, INT4, INT8, KV, READ, UNITS, MachineLimits, ModelSizes
from benchmarks.harness import Figure
from benchmarks.peers.environments import Contestant

INT8_NAME, BF16_NAME, INT4_NAME = "pdmesh int8", "pdmesh bf16", "pdmesh int4"


@dataclass(frozen=True)
class Versus:
    """What one of our formats is asked for. `decode` by batch and `prefill` by length: times the fastest peer. `share`: of read
    bandwidth at batch 1; with `either` it takes the place of the times where those are short."""

    decode: Mapping[int, float]
    prefill: Mapping[int, float] = field(default_factory=dict)
    share: float | None = None
    either: bool = False


@dataclass(frozen=True)
class Goals:
    """What a part is asked for. `versus` and `prefill_share` (of the product peak) by our contestant; `over`: our formats over
    another of ours at batch 1."""

    versus: Mapping[str, Versus]
    prefill_share: Mapping[str, float] = field(default_factory=dict)
    over: Mapping[tuple[str, str], float] = field(default_factory=dict)
    by_bits: bool = True


@dataclass(frozen=True)
class Results:
    """All that figures are made of. `notes`: what each child said of itself."""

    label: str
    plan: Plan
    goals: Goals
    sizes: ModelSizes
    contestants: Sequence[Contestant]
    medians: Mapping[str, float]
    notes: Mapping[str, Mapping[str, object]]
    limits: MachineLimits | None

    def bytes_per_weight(self, contestant: Contestant) -> float:
        """Return them as the engine counts what it reads, else as the format says."""
        counted = self.notes.get(contestant.name, {}).get("weight_bytes")
        return counted / self.sizes.num_weights if isinstance(counted, int) else contestant.bytes_per_weight

    def kv_bytes_per_token(self, contestant: Contestant) -> float | None:
        """Return them as the engine says; None for a peer, which says nothing of them."""
        said = self.notes.get(contestant.name, {}).get("kv_bytes_per_token")
        return said if isinstance(said, float) else None

    def fastest_peer(self, case_of: Mapping[str, str], bits: int) -> tuple[str, float] | None:
        """Return its name and speed; `case_of` maps contestants to their cases, `bits` are ours."""
        speeds = [
            (contestant.name, self.medians[case_of[contestant.name]])
            for contestant in self.contestants
            if self._is_rival(contestant, bits) and case_of[contestant.name] in self.medians
        ]
        return max(speeds, key=lambda named: named[1], default=None)

    def _is_rival(self, contestant: Contestant, bits: int) -> bool:
        return not contestant.is_ours and (not self.goals.by_bits or (contestant.bits == 4) == (bits == 4))

    def named(self, name: str) -> Contestant | None:
        """Return the contestant of this name, if it takes part."""
        return next((contestant for contestant in self.contestants if contestant.name == name), None)


def all_figures(results: Results) -> list[Figure]:
    """Return all, in the order in which they are read. Pure."""
    parts = (machine, speeds, against_peers, shares, prefill_shares, formats)
    return [figure for part in parts for figure in part(results)]


def machine(results: Results) -> Iterator[Figure]:
    """Yield the machine's own, medians of this part's rounds."""
    for name in (READ, INT4, INT8, BF16, KV):
        if name in results.medians:
            yield Figure(f"{results.label}: {name}", results.medians[name], UNITS[name], "higher")


def speeds(results: Results) -> Iterator[Figure]:
    """Yield each contestant's tokens a second beside what the machine allows for its weights."""
    for contestant in results.contestants:
        for case, limit in _limits(results, contestant).items():
            if case in results.medians:
                yield Figure(f"{results.label}: {case}", results.medians[case], "tokens/s", "higher", limit=limit)


def _limits(results: Results, contestant: Contestant) -> dict[str, float | None]:
    """Of each case; None where the machine could not be measured."""
    name, plan, limits, sizes = contestant.name, results.plan, results.limits, results.sizes
    decodes = {decode_case(name, batch): batch for batch in plan.batches}
    prefills = {prefill_case(name, length): length for length in plan.prefills}
    if limits is None:
        return dict.fromkeys([*decodes, *prefills])
    width, context, kv_bytes = results.bytes_per_weight(contestant), plan.mean_context, results.kv_bytes_per_token(contestant)
    return {
        **{case: limits.decode_speed(sizes, width, batch, context, kv_bytes) for case, batch in decodes.items()},
        **{case: limits.prefill_speed(sizes, width, length) for case, length in prefills.items()},
    }


def against_peers(results: Results) -> Iterator[Figure]:
    """Yield our formats over the fastest peer at each size."""
    names = [contestant.name for contestant in results.contestants]
    for own, versus in results.goals.versus.items():
        contestant = results.named(own)
        if contestant is None:
            continue
        sized = [
            *((f"decode, batch {batch}", decode_case, batch, versus.decode.get(batch)) for batch in results.plan.batches),
            *((f"prefill, {n} tokens", prefill_case, n, versus.prefill.get(n)) for n in results.plan.prefills),
        ]
        for label, case, size, goal in sized:
            fastest = results.fastest_peer({name: case(name, size) for name in names}, contestant.bits)
            ours = results.medians.get(case(own, size))
            if fastest is None or not ours:
                continue
            peer, speed = fastest
            stated = None if versus.either and (case, size) == (decode_case, 1) else goal
            text = f"{results.label}: {own} over the fastest peer: {label}"
            yield Figure(text, ours / speed, "times", "higher", goal=stated, peer=f"{peer}, {speed:.4g} tokens/s")


def shares(results: Results) -> Iterator[Figure]:
    """Yield shares of read bandwidth at batch 1. Of what is read only weights count: the KV comes on top."""
    for own, versus in results.goals.versus.items():
        contestant, speed = results.named(own), results.medians.get(decode_case(own, 1))
        if results.limits is None or contestant is None or not speed:
            continue
        num_bytes = results.bytes_per_weight(contestant) * results.sizes.num_weights
        share = speed * num_bytes / results.limits.bytes_s
        label = f"{results.label}: {own}: batch 1, share of read bandwidth ({num_bytes / 1e6:.0f} MB of weights a token)"
        yield Figure(label, share, "share", "higher", goal=None if versus.either else versus.share, limit=1.0)
        yield from _either(results, contestant, versus, speed, share)


def _either(results: Results, contestant: Contestant, versus: Versus, speed: float, share: float) -> Iterator[Figure]:
    """Yield how much of its goal is reached where one of two is enough."""
    if not versus.either or not versus.share:
        return
    times = versus.decode[1]
    fastest = results.fastest_peer({other.name: decode_case(other.name, 1) for other in results.contestants}, contestant.bits)
    reached = max(share / versus.share, speed / fastest[1] / times if fastest else 0.0)
    label = f"{contestant.name}: batch 1, {times:g} times the fastest peer or {versus.share:.0%} of read bandwidth"
    yield Figure(f"{results.label}: {label}", reached, "of the nearer goal", "higher", goal=1.0)


def prefill_shares(results: Results) -> Iterator[Figure]:
    """Yield shares of the product peak, with attention's products and without them."""
    if results.limits is None:
        return
    for contestant in (contestant for contestant in results.contestants if contestant.is_ours):
        goal, width = results.goals.prefill_share.get(contestant.name), results.bytes_per_weight(contestant)
        for length in results.plan.prefills:
            speed = results.medians.get(prefill_case(contestant.name, length))
            if not speed:
                continue
            limit = results.limits.prefill_speed(results.sizes, width, length)
            label = f"{results.label}: {contestant.name}: prefill of {length} tokens, share of product peak"
            yield Figure(f"{label} (with attention's at its own)", speed / limit, "share", "higher", goal=goal, limit=1.0)
            rate = speed / length * results.sizes.prefill_weight_operations(length)
            yield Figure(f"{label} (weights' alone)", rate / results.limits.peak(width), "share", "higher", limit=1.0)


def formats(results: Results) -> Iterator[Figure]:
    """Yield our formats over each other at batch 1."""
    for (own, base), goal in results.goals.over.items():
        speed, other = (results.medians.get(decode_case(name, 1)) for name in (own, base))
        if speed and other:
            label = f"{results.label}: {own} over {base}: decode, batch 1"
            yield Figure(label, speed / other, "times", "higher", goal=goal, peer=base)
