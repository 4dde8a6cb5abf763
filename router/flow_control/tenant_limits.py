"""What a tenant may take, and who knows it."""

from dataclasses import dataclass, replace
from typing import Protocol

MAX_WEIGHT = 1000.0


@dataclass(frozen=True)
class TenantLimits:
    """`weight` is its share beside others of the same priority. `max_inflight` and the rate `tokens_per_s` (prompt + output)
    bound it even when the mesh is idle, None: they do not. `burst_tokens` may come at once; None: ten seconds of the rate."""

    weight: float = 1.0
    max_inflight: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: float | None = None

    @property
    def burst(self) -> float:
        """Tokens that the bucket holds when it is full; 0 without a rate."""
        if self.burst_tokens is not None:
            return self.burst_tokens
        return 10.0 * (self.tokens_per_s or 0.0)

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        _require(0 < self.weight <= MAX_WEIGHT, "weight", f"must be more than 0 and at most {MAX_WEIGHT:g}")
        _require(self.max_inflight is None or self.max_inflight >= 1, "max_inflight", "must be at least 1")
        _require(self.tokens_per_s is None or self.tokens_per_s > 0, "tokens_per_s", "must be positive")
        _require(self.burst_tokens is None or self.burst_tokens > 0, "burst_tokens", "must be positive")
        _require(self.burst_tokens is None or self.tokens_per_s is not None, "burst_tokens", "needs tokens_per_s")

    def at_share(self, share: float) -> "TenantLimits":
        """The part of rate and burst that one of several routers gives out; `share` in (0, 1]."""
        if self.tokens_per_s is None:
            return self
        return replace(self, tokens_per_s=self.tokens_per_s * share, burst_tokens=self.burst * share)


class TenantBook(Protocol):
    """Looked at whenever a request asks, so that changed limits hold from the next request on."""

    def limits_of(self, tenant: str) -> TenantLimits:
        """Of any name, also one never heard of; "" is the default tenant. Cheap: no I/O."""


class SameForAll:
    """Every tenant has the same limits: none but an equal share, unless told otherwise."""

    def __init__(self, limits: TenantLimits | None = None) -> None:
        self._limits = limits or TenantLimits()

    def limits_of(self, tenant: str) -> TenantLimits:
        """The same for every name."""
        return self._limits


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {what}")
