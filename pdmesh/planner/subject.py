"""The subject of a plan: the worker's speed, its source, the price. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.planning.devices import Device
from pdmesh.planning.roofline import Decoder


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
        return f"{self.model} ({_billions(self.decoder.num_parameters)} parameters, {self.weights}) on {self.device.name}"

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
