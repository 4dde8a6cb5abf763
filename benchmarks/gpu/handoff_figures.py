"""What comes of the rounds of a hand-off over one transport. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.harness import Figure

MILLISECONDS_GOAL, EXPOSED_GOAL = 10.0, 5.0


@dataclass
class Samples:
    """Of one transport; seconds, but `late_ns`: from the last step's end to the commit."""

    alone: list[float] = field(default_factory=list)  # prefills with nobody to hand off to
    beside: list[float] = field(default_factory=list)  # prefills while their KV leaves
    late_ns: list[int] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def transfer_s(self) -> float:
        return statistics.median(self.transfer)

    @property
    def late_s(self) -> float:
        return statistics.median(self.late_ns) / 1e9

    @property
    def slower(self) -> float:
        """Share by which the prefill is slower while it is handed off: of each round, whose prefills ran one after the other."""
        return statistics.median(beside / alone for beside, alone in zip(self.beside, self.alone, strict=True)) - 1

    @property
    def exposed(self) -> float:
        """Share of the transfer that comes on top of the prefill."""
        rounds = zip(self.alone, self.beside, self.late_ns, strict=True)
        return statistics.median(beside + late / 1e9 - alone for alone, beside, late in rounds) / self.transfer_s


def figures(transport: str, samples: Samples, bytes_per_s: float, *, is_best: bool) -> Iterator[Figure]:
    """The limit: every byte read and written once. Goals are for the transport that a mesh takes here."""
    name = f"hand-off of {size_words(samples.num_bytes)} of KV between two processes on the device, {transport}"
    least_ms, transfer_ms = 2 * samples.num_bytes / bytes_per_s * 1e3, samples.transfer_s * 1e3
    yield Figure(name, transfer_ms, "ms", "lower", goal=MILLISECONDS_GOAL if is_best else None, limit=least_ms)
    yield Figure(f"{name}: share of bandwidth", 100 * least_ms / transfer_ms, "%", "higher", limit=100.0)
    beside, goal = f"hand-off beside its prefill, {transport}", EXPOSED_GOAL if is_best else None
    yield Figure(f"{beside}: part that is not hidden", 100 * samples.exposed, "%", "lower", goal=goal, limit=0.0)
    yield Figure(f"{beside}: from the last layer to the commit", samples.late_s * 1e3, "ms", "lower")
    yield Figure(f"{beside}: what the prefill loses", 100 * samples.slower, "%", "lower", limit=0.0)


def size_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e3:.3g} KB"
