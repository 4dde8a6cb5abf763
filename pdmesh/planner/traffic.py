"""The planned load: a trace as a list, and its moments for capacity planning. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from pdmesh.planning.capacity_load import Lengths, Load
from pdmesh.planning.devices import Device
from pdmesh.planning.roofline import Decoder
from pdmesh.simulator import arrivals as simulator_arrivals
from pdmesh.simulator.arrivals import BLOCK_TOKENS, Arrival

MAX_BURSTINESS = 25.0
"""Beyond this value it is not chance but a changing rate, which simulation covers and capacity planning does not."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """Hold arrivals in the order of their time, at least two, not all at once."""

    arrivals: tuple[Arrival, ...]

    def __post_init__(self) -> None:
        if len(self.arrivals) < 2 or self.duration_s <= 0:
            raise ValueError("requests: a load needs at least two requests at different times")

    @property
    def duration_s(self) -> float:
        """Return the time from the first to the last."""
        return self.arrivals[-1].at_s - self.arrivals[0].at_s

    @property
    def rate_per_s(self) -> float:
        """Return the average rate."""
        return (len(self.arrivals) - 1) / self.duration_s

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, prompt and output."""
        return max(arrival.num_input + arrival.num_output for arrival in self.arrivals)

    @property
    def num_output_tokens(self) -> int:
        """Return the output tokens of all requests."""
        return sum(arrival.num_output for arrival in self.arrivals)

    def faster(self, factor: float) -> Traffic:
        """Return `factor` times as many in a second."""
        return Traffic(tuple(simulator_arrivals.at_rate(self.arrivals, factor)))

    def busiest(self, num: int) -> Traffic:
        """Return the `num` consecutive requests with the most tokens a second; all, if there are no more."""
        if num >= len(self.arrivals):
            return self
        sums = [0]
        for arrival in self.arrivals:
            sums.append(sums[-1] + arrival.num_input + arrival.num_output)
        last = len(self.arrivals) - num

        def density(first: int) -> float:
            span_s = self.arrivals[first + num - 1].at_s - self.arrivals[first].at_s
            return (sums[first + num] - sums[first]) / max(span_s, 1e-9)

        first = max(range(last + 1), key=density)
        start_s = self.arrivals[first].at_s
        return Traffic(tuple(arrival._replace(at_s=arrival.at_s - start_s) for arrival in self.arrivals[first : first + num]))

    @cached_property
    def uncached(self) -> tuple[int, ...]:
        """Return the tokens of each prompt that are no prefix hit, with an unbounded cache; at least one."""
        seen: set[int] = set()
        return tuple(_uncached(arrival, seen) for arrival in self.arrivals)

    @cached_property
    def load(self) -> Load:
        """Return its moments."""
        inputs, outputs = [a.num_input for a in self.arrivals], [a.num_output for a in self.arrivals]
        num, total = len(self.arrivals), sum(inputs)
        cached_share = max(0.0, 1 - sum(self.uncached) / total) if total else 0.0
        lengths = Lengths(
            total / num,
            sum(value * value for value in inputs) / num,
            sum(outputs) / num,
            cached_share=min(0.95, cached_share),
            output_squared=sum(value * value for value in outputs) / num,
        )
        return Load(self.rate_per_s, lengths, self._burstiness())

    def _burstiness(self) -> float:
        """Return the squared coefficient of variation of the gaps."""
        times = [arrival.at_s for arrival in self.arrivals]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return min(MAX_BURSTINESS, sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2)


def traffic_of(arrivals: Iterable[Arrival]) -> Traffic:
    """Return all arrivals as a load. Raises ValueError, and what reading them raises."""
    return Traffic(tuple(arrivals))


def _uncached(arrival: Arrival, seen: set[int]) -> int:
    num_known = 0
    for name in arrival.hashes:
        if name not in seen:
            break
        num_known += 1
    seen.update(arrival.hashes)
    return max(1, arrival.num_input - num_known * BLOCK_TOKENS)


# The subject of a plan: the worker's speed, its source, the price. Pure.


@dataclass(frozen=True)
class Money:
    """Hold a price. `per_hour`: of a device; None: unknown."""

    per_hour: float | None = None

    def of(self, cost: int) -> float | None:
        """Return the price of an hour of so many devices."""
        return None if self.per_hour is None else cost * self.per_hour

    def per_million(self, cost: int, tokens_per_s: float) -> float | None:
        """Return the price of a million output tokens."""
        price = self.of(cost)
        return None if price is None or not tokens_per_s else price / 3600 / tokens_per_s * 1e6


@dataclass(frozen=True)
class Subject:
    """Describe the subject. `device` None: a speed that was measured, in the file `speed`. `load`: the trace, or what was
    generated, in words. `notes`: what was left out, and what was assumed."""

    model: str
    load: str
    weights: str
    device: Device | None = None
    decoder: Decoder | None = None
    speed: str = ""
    money: Money = field(default_factory=Money)
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Return model and device in a line."""
        if self.device is None or self.decoder is None:
            return f"{self.model} on workers as measured in {self.speed}"
        size = f"{_billions(self.decoder.num_parameters)} parameters"
        if self.decoder.experts is not None:
            size += f", {_billions(self.decoder.num_active_parameters)} active"
        return f"{self.model} ({size}, {self.weights}) on {self.device.name}"

    @property
    def unit(self) -> str:
        """Return the unit of cost, in the plural."""
        return "GPUs" if self.device is not None and self.device.is_gpu else "workers"

    @property
    def assumed(self) -> str:
        """Return the source of the speed."""
        device = self.device
        if device is None:
            return f"speed: measured ({self.speed})"
        shares = f"{device.compute_share:.0%} of the operations and {device.memory_share:.0%} of the bandwidth"
        return f"speed: {device.source}; of that {shares}"


def _billions(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"
