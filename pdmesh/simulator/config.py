"""Configuration of `python -m pdmesh.simulator`: flags, environment and `--help` come from this dataclass."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import PoolName
from pdmesh.planning.objectives import DEFAULT_QUANTILE, ModelObjective
from pdmesh.simulator import arrivals as simulator_arrivals
from pdmesh.simulator.arrivals import READERS, Arrival, log_normal, poisson
from pdmesh.simulator.autoscaling import AutoscaledSettings
from pdmesh.simulator.routers.routing import MODEL
from pdmesh.simulator.settings import Fetching, HandOff, MeshSettings, Tiers
from router.flow_control.capacity import AdmissionSettings
from router.routing.policy import POLICIES

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(x|/s)")
_PAIR = re.compile(r"([0-9]+(?:\.[0-9]+)?)@([0-9]+(?:\.[0-9]+)?)")
_NOT_NEGATIVE = (
    "prefill", "decode", "both", "ttft_ms", "tpot_ms", "max_queued", "local_prefill_tokens", "until_s", "pod_start_s",
    "fetch_gb_per_s", "tier_gb",
)  # fmt: skip
_POSITIVE = (
    "scale_period_s", "input_tokens", "output_tokens", "input_scale", "output_scale", "window_s", "report_period_ms",
    "handoff_gb_per_s", "tier_gb_per_s",
)  # fmt: skip
_POOLS = "needs a pool of each role (--prefill and --decode), or workers with both (--both), to begin with"
WINDOW_S = AutoscaledSettings().window_s


@dataclass(frozen=True)
class SimulatorConfig:
    """Replay a trace, or generated arrivals, through a simulated mesh that decides as the real one does."""

    speed: str = field(metadata={"help": "JSON file that says what a worker is: see pdmesh/simulator/workers/spec.py"})
    trace: str = field(default="", metadata={"help": "KIND=PATH, of azure-conv, azure-code, mooncake; empty: generated arrivals"})
    rate: str = field(default="1x", metadata={"help": "how fast requests come: 2x (as the trace, faster) or 50/s (on average)"})
    requests: int | None = field(
        default=None, metadata={"help": "requests, of a trace repeated as needed; empty: those of the trace, once"}
    )
    input_tokens: float = field(default=1024, metadata={"help": "generated arrivals: mean length of prompts"})
    output_tokens: float = field(default=256, metadata={"help": "generated arrivals: mean length of outputs"})
    scatter: float = field(default=0.8, metadata={"help": "generated arrivals: sigma of the log-normal lengths; 0: all alike"})
    input_scale: float = field(default=1.0, metadata={"help": "prompts so many times as long"})
    output_scale: float = field(default=1.0, metadata={"help": "outputs so many times as long"})
    swing: str = field(default="", metadata={"help": "DEPTH@PERIOD: the rate swings; 0.5@86400: by half, once a day"})
    burst: str = field(default="", metadata={"help": "FACTOR@START: from that second on, for a minute, so many times as many"})
    prefill: int = field(default=0, metadata={"help": "workers with the prefill role"})
    decode: int = field(default=0, metadata={"help": "workers with the decode role"})
    both: int = field(default=0, metadata={"help": "workers with both roles"})
    routers: int = field(default=1, metadata={"help": "routers, to which arrivals go in turn; they do not know of each other"})
    policy: str = field(default="predict", metadata={"help": "how workers are chosen, as the router's flag", "choices": POLICIES})
    local_prefill_tokens: int = field(default=32, metadata={"help": "as the router's flag"})
    ttft_ms: int = field(default=0, metadata={"help": "objective for the time to the first token; 0: none"})
    tpot_ms: int = field(default=0, metadata={"help": "objective for the time per output token; 0: none"})
    admission: Literal["on", "off"] = field(default="on", metadata={"help": "whether routers use admission control"})
    max_inflight: int = field(default=256, metadata={"help": "requests admitted at the same time, of each router"})
    max_queued: int = field(default=256, metadata={"help": "requests that may wait for admission, of each router"})
    call_ms: float = field(default=0.5, metadata={"help": "one way between router and worker"})
    report_period_ms: float = field(default=200, metadata={"help": "period of load reports; workers that decode report twice"})
    handoff_ms: float = field(default=2, metadata={"help": "what a hand-off adds, whatever its size"})
    handoff_gb_per_s: float = field(default=5, metadata={"help": "bandwidth of hand-offs, 10^9 bytes a second"})
    fetch_gb_per_s: float = field(
        default=0,
        metadata={"help": "bandwidth at which prefill workers fetch KV from others, 10^9 bytes a second; 0: they do not"},
    )
    tier_gb: float = field(
        default=0, metadata={"help": "host memory and disk for KV beneath each worker's pool, 10^9 bytes; 0: none"}
    )
    tier_gb_per_s: float = field(
        default=2, metadata={"help": "bandwidth at which KV is restored from there, 10^9 bytes a second"}
    )
    autoscale: Literal["on", "off"] = field(
        default="off", metadata={"help": "whether the autoscaler's policy changes the pools; the counts are those of the start"}
    )
    pod_start_s: float = field(default=60, metadata={"help": "autoscaling: from asking for a pod until it serves"})
    scale_period_s: float = field(default=5, metadata={"help": "autoscaling: between decisions"})
    scaler: AutoscalerSettings = field(default_factory=AutoscalerSettings)
    report: str = field(default="", metadata={"help": "autoscaling: HTML file to write that shows pools, load and decisions"})
    window_s: float = field(default=60, metadata={"help": "length of the windows of the report"})
    until_s: float = field(default=0, metadata={"help": "stop then; what is under way counts as lost; 0: when all have ended"})
    seed: int = field(default=0, metadata={"help": "of generated arrivals and of the moments of reports"})
    json: bool = field(default=False, metadata={"help": "print one JSON object instead of text"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        _require(self.decode + self.both >= 1, "decode", "there must be a worker that decodes; give --decode or --both")
        for name in _NOT_NEGATIVE:
            _require(getattr(self, name) >= 0, name, "must not be negative")
        for name in _POSITIVE:
            _require(getattr(self, name) > 0, name, "must be positive")
        _require(bool(self.ttft_ms) == bool(self.tpot_ms), "ttft_ms", "give both objectives (--ttft-ms, --tpot-ms) or neither")
        _require(self.max_inflight >= 1 and self.routers >= 1, "max_inflight", "must be at least 1, as must --routers")
        if self.autoscale == "on":
            self._check_autoscaling()
        rate = _RATE.fullmatch(self.rate)
        _require(rate is not None and float(rate[1]) > 0, "rate", f"{self.rate!r} is neither as 2x nor as 50/s")
        if self.trace:
            kind, separator, path = self.trace.partition("=")
            known = ", ".join(READERS)
            _require(
                bool(separator and path) and kind in READERS, "trace", f"{self.trace!r} is not KIND=PATH with one of {known}"
            )
        else:
            _require(self.rate.endswith("/s"), "rate", "generated arrivals need a rate as 50/s, or give --trace")
            _require(self.requests is not None, "requests", "generated arrivals have no end; say how many")
        _require(self.requests is None or self.requests >= 1, "requests", "give 1 or more, or nothing for those of the trace")
        self._check_shape()

    def _check_shape(self) -> None:
        """Check the shape of the load."""
        if self.swing:
            _require(_PAIR.fullmatch(self.swing) is not None, "swing", f"{self.swing!r} is not DEPTH@PERIOD, such as 0.5@86400")
            depth, period_s = _pair(self.swing)
            _require(depth < 1, "swing", f"the depth {depth:g} is not below 1: 0.5 is a swing by half")
            _require(period_s > 0, "swing", f"the period {period_s:g} is not more than 0 seconds")
        if self.burst:
            _require(_PAIR.fullmatch(self.burst) is not None, "burst", f"{self.burst!r} is not FACTOR@START, such as 3@300")
            _require(_pair(self.burst)[0] > 0, "burst", "the factor 0 is not more than 0")

    def _check_autoscaling(self) -> None:
        self.scaler.validate()
        _require(bool(self.ttft_ms), "autoscale", "needs objectives: give --ttft-ms and --tpot-ms")
        is_separated = bool(self.prefill and self.decode and not self.both)
        _require(is_separated or bool(self.both and not (self.prefill or self.decode)), "autoscale", _POOLS)
        _require(self.scale_period_s <= WINDOW_S, "scale_period_s", f"must be at most {WINDOW_S:g}")

    @property
    def pools(self) -> dict[PoolName, int]:
        """Return the workers at the start, by pool."""
        counts = {PoolName.PREFILL: self.prefill, PoolName.DECODE: self.decode, PoolName.BOTH: self.both}
        return {pool: count for pool, count in counts.items() if count}

    def autoscaling(self) -> tuple[AutoscaledSettings, AutoscalerSettings]:
        """Return the settings of the scaling and of the policy."""
        prefill, decode, both = (replace(self.scaler.of(pool), start_s=self.pod_start_s) for pool in PoolName)
        own = replace(self.scaler, prefill=prefill, decode=decode, both=both)
        return AutoscaledSettings(self.pod_start_s, self.scale_period_s), own

    def arrivals(self, max_context: int) -> Iterator[Arrival]:
        """Return the load, lazily. Raises TraceError."""
        arrivals = simulator_arrivals.lengths(
            self._paced(), inputs=self.input_scale, outputs=self.output_scale, max_context=max_context
        )
        if self.swing:
            depth, period_s = _pair(self.swing)
            arrivals = simulator_arrivals.warped(arrivals, simulator_arrivals.swing(period_s, depth))
        if self.burst:
            factor, start_s = _pair(self.burst)
            arrivals = simulator_arrivals.warped(arrivals, simulator_arrivals.burst(start_s, factor))
        return arrivals

    def mesh(self) -> MeshSettings:
        """Return the settings of the mesh, without workers and load."""
        period_s = self.report_period_ms / 1e3
        objective = ModelObjective(MODEL, self.ttft_ms, self.tpot_ms, DEFAULT_QUANTILE) if self.ttft_ms else None
        admission = AdmissionSettings(max_inflight=self.max_inflight, max_queued=self.max_queued)
        return MeshSettings(
            num_routers=self.routers,
            policy=self.policy,
            local_prefill_tokens=self.local_prefill_tokens,
            admission=admission if self.admission == "on" else None,
            objective=objective,
            call_s=self.call_ms / 1e3,
            report_period_s=period_s,
            decode_report_period_s=period_s / 2,
            handoff=HandOff(fixed_s=self.handoff_ms / 1e3, bytes_per_s=self.handoff_gb_per_s * 1e9),
            fetching=Fetching(self.fetch_gb_per_s * 1e9) if self.fetch_gb_per_s else None,
            tiers=Tiers(self.tier_gb * 1e9, self.tier_gb_per_s * 1e9) if self.tier_gb else None,
        )

    def _paced(self) -> Iterator[Arrival]:
        """Return the arrivals at their rate."""
        number, is_factor = float(self.rate.rstrip("x/s")), self.rate.endswith("x")
        if not self.trace:
            assert self.requests is not None
            return simulator_arrivals.repeated(lambda: self._generated(number), self.requests)
        kind, _, path = self.trace.partition("=")
        factor = number if is_factor else number / (simulator_arrivals.mean_rate(READERS[kind](path)) or number)

        def again() -> Iterable[Arrival]:
            return simulator_arrivals.at_rate(READERS[kind](path), factor)

        return simulator_arrivals.repeated(again, self.requests) if self.requests else iter(again())

    def _generated(self, rate: float) -> Iterator[Arrival]:
        return poisson(rate, log_normal(self.input_tokens, self.output_tokens, self.scatter), self.seed)


def _pair(text: str) -> tuple[float, float]:
    first, _, second = text.partition("@")
    return float(first), float(second)


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {what}")
