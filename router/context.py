"""What all requests of one router share."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdmesh.planning.objectives import ModelObjective
from pdmesh.runtime.identity import new_epoch
from pdmesh.runtime.telemetry.tracing import OFF, Tracing
from router.background import Background
from router.config import RouterConfig
from router.fleet.hedging import HedgeLimits, Hedging
from router.fleet.judge import Judge
from router.fleet.migration import Movable
from router.fleet.registry import Fleet
from router.flow_control.capacity import AdmissionSettings
from router.flow_control.controller import Admission
from router.flow_control.forecast import Forecaster
from router.flow_control.gate import Gate
from router.flow_control.tenant_limits import TenantBook
from router.kv_index.index import PrefixIndex
from router.lifecycle.capacity_queue import RoomLine
from router.routing.cost_policy import Policy, PredictPolicy
from router.routing.decisions import Decisions
from router.routing.output_lengths import OutputLengths
from router.routing.overheads import Overheads
from router.routing.policies.single_signal import PreferencePolicy, preference
from router.telemetry.metrics import RequestMetrics
from router.telemetry.traffic import Traffic
from router.tokenization.served_model import ServedModel
from router.trace_keeper import TraceKeeper


@dataclass(eq=False)
class Core:
    """The parts of a router process, whose `epoch` tells it from others of its id. `movers` are the requests that have a decode
    worker now. Without a `forecaster` admission goes by count. `num_token_mismatches` counts repeated indexes whose token
    differed: not 0 is a bug."""

    config: RouterConfig
    router_id: str
    models: dict[str, ServedModel]
    fleet: Fleet
    gate: Gate
    prefixes: PrefixIndex
    policy: Policy
    overheads: Overheads
    objectives: Mapping[str, ModelObjective] = field(default_factory=dict)
    output_lengths: OutputLengths = field(default_factory=OutputLengths)
    decisions: Decisions = field(default_factory=Decisions)
    forecaster: Forecaster | None = None
    room: RoomLine = field(default_factory=RoomLine)
    background: Background = field(default_factory=Background)
    movers: set[Movable] = field(default_factory=set)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    tracing: Tracing = OFF
    epoch: int = field(default_factory=new_epoch)
    judge: Judge = field(init=False)
    traffic: Traffic = field(init=False)
    hedging: Hedging = field(init=False)
    trace_keeper: TraceKeeper = field(init=False)
    num_token_mismatches: int = 0
    num_hedges: int = 0
    num_migrations: int = 0

    def __post_init__(self) -> None:
        self.judge = Judge(self.fleet.views)
        self.traffic = Traffic(self.models, time.monotonic())
        self.hedging = Hedging(HedgeLimits(share=self.config.hedge_share))
        self.trace_keeper = TraceKeeper(self.background)

    @classmethod
    def build(
        cls,
        config: RouterConfig,
        router_id: str,
        models: dict[str, ServedModel],
        fleet: Fleet,
        objectives: Iterable[ModelObjective] = (),
        tenants: TenantBook | None = None,
    ) -> "Core":
        """Empty queues and memories from the configuration. Without a book all tenants are equal and unlimited."""
        gate = Gate(Admission(_settings(config), tenants))
        prefixes, overheads = PrefixIndex(config.prefix_index_blocks), Overheads()
        goals = {goal.model: goal for goal in objectives}
        return cls(config, router_id, models, fleet, gate, prefixes, _policy(config, overheads), overheads, goals)

    def max_context(self, model: ServedModel) -> int:
        """Tokens that a request to `model` may have: the model's, or what the largest worker known has been given."""
        largest = self.fleet.max_context(model.name)
        return model.max_context if largest is None else min(model.max_context, largest)


def _settings(config: RouterConfig) -> AdmissionSettings:
    return AdmissionSettings(
        max_inflight=config.max_inflight,
        max_queued=config.max_queued,
        max_queued_bytes=config.max_queued_bytes,
        hold_timeout_s=config.hold_timeout_s,
        aging_s=config.aging_s,
    )


def _policy(config: RouterConfig, overheads: Overheads) -> Policy:
    if config.policy == "predict":
        return PredictPolicy(overheads, local_prefill_tokens=config.local_prefill_tokens)
    return PreferencePolicy(preference(config.policy), config.local_prefill_tokens)


def time_left_s(deadline: float | None) -> float | None:
    """Seconds until `deadline` (event-loop time), at least a millisecond; None without one."""
    return None if deadline is None else max(0.001, deadline - asyncio.get_running_loop().time())


def time_left_ms(deadline: float | None) -> int:
    """As it travels: milliseconds, 0 without a deadline."""
    left_s = time_left_s(deadline)
    return 0 if left_s is None else max(1, round(left_s * 1000))
