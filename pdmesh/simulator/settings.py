"""Settings of a simulated mesh, besides its workers. The defaults are those of the real one, or were measured on it."""

from dataclasses import dataclass, field

from pdmesh.planning.objectives import ModelObjective
from router.flow_control.capacity import AdmissionSettings
from router.routing.cost_model import FETCH_S, RESTORE_S
from router.routing.policy import POLICIES


@dataclass(frozen=True)
class HandOff:
    """Model the KV hand-off after the first token: `fixed_s`, and the part of the transfer (`bytes_per_s`) that computing the
    prompt did not hide: at least one of `num_parts`, in which it is sent as it is computed."""

    fixed_s: float = 2e-3
    bytes_per_s: float = 5e9
    num_parts: int = 8

    def exposed_s(self, num_bytes: float, compute_s: float) -> float:
        """Return the exposed time. `compute_s`: the prompt's, from its first chunk to its last."""
        transfer_s = num_bytes / self.bytes_per_s
        return self.fixed_s + max(transfer_s - compute_s, transfer_s / self.num_parts)


@dataclass(frozen=True)
class Fetching:
    """Model KV that prefill workers fetch from other workers: `fixed_s`, and its bytes. A worker sends `max_sends` at a time."""

    bytes_per_s: float
    fixed_s: float = FETCH_S
    max_sends: int = 4

    def fetch_s(self, num_bytes: float) -> float:
        """Return the time of a fetch."""
        return self.fixed_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Tiers:
    """Model the tiers beneath each worker's block pool as one: `num_bytes`, from which KV is restored at `bytes_per_s` after
    `fixed_s`. What a worker publishes is written there at once, at no cost."""

    num_bytes: float
    bytes_per_s: float
    fixed_s: float = RESTORE_S

    def restore_s(self, num_bytes: float) -> float:
        """Return the time of a restore."""
        return self.fixed_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class MeshSettings:
    """Configure the mesh. `call_s`: one way between router and worker; `token_s`: from the end of a step to the client, None:
    `call_s`. Reports come every `report_period_s`, of decode workers every `decode_report_period_s` (they report on two streams),
    and arrive `report_delay_s` after they were made. `admission` None: all requests are admitted. `objective` of requests; None:
    none. `max_tokens`: what clients ask for at most, None: as much as the context holds. `router_s`: from a request's arrival to
    admission (tokenizing, checks). `fetching` and `tiers` None: there are none. The rest is as the flags of the router of
    the same names."""

    num_routers: int = 1
    policy: str = "predict"
    local_prefill_tokens: int = 32
    admission: AdmissionSettings | None = field(default_factory=AdmissionSettings)
    objective: ModelObjective | None = None
    max_tokens: int | None = None
    prefix_index_blocks: int = 1_000_000
    room_timeout_s: float = 60.0
    place_timeout_s: float = 5.0
    resubmit_timeout_s: float = 30.0
    max_resubmissions: int = 16
    router_s: float = 1e-3
    call_s: float = 5e-4
    token_s: float | None = None
    report_period_s: float = 0.2
    decode_report_period_s: float = 0.1
    report_delay_s: float = 2e-3
    loss_notice_s: float = 1.0
    handoff: HandOff = field(default_factory=HandOff)
    fetching: Fetching | None = None
    tiers: Tiers | None = None

    def __post_init__(self) -> None:
        _require(self.num_routers >= 1, "num_routers", "must be at least 1")
        _require(self.policy in POLICIES, "policy", f"must be one of {', '.join(POLICIES)}")
        for name in ("report_period_s", "decode_report_period_s", "room_timeout_s", "place_timeout_s", "resubmit_timeout_s"):
            _require(getattr(self, name) > 0, name, "must be positive")
        for name in ("router_s", "call_s", "report_delay_s", "loss_notice_s", "local_prefill_tokens", "max_resubmissions"):
            _require(getattr(self, name) >= 0, name, "must not be negative")
        _require(self.token_s is None or self.token_s >= 0, "token_s", "must not be negative")
        _require(self.handoff.bytes_per_s > 0 and self.handoff.num_parts >= 1, "handoff", "must have a bandwidth and a part")
        if self.fetching is not None:
            is_usable = self.fetching.bytes_per_s > 0 and self.fetching.fixed_s >= 0 and self.fetching.max_sends >= 1
            _require(is_usable, "fetching", "must have a bandwidth, and a worker that sends")
        if self.tiers is not None:
            is_usable = self.tiers.num_bytes > 0 and self.tiers.bytes_per_s > 0 and self.tiers.fixed_s >= 0
            _require(is_usable, "tiers", "must have a size and a bandwidth; leave them out for none")


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {what}")
