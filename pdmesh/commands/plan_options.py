"""The options of `pdmesh plan`, in groups: what runs, where, under which load, with which promise."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdmesh.commands.durations import milliseconds
from pdmesh.simulator.config import SimulatorConfig

_GENERATED = 4000
"""Requests, where nobody says how many."""
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class Machine:
    """Where it runs, and how fast."""

    device: str = field(
        default="", metadata={"help": "known device (an unknown name lists them) or .json file that describes one"}
    )
    speed: str = field(
        default="", metadata={"help": "JSON file of a measured worker (simulator/worker_spec.py), in place of --device"}
    )
    measure: bool = field(
        default=False, metadata={"help": "measure a worker on this machine first; --speed says where to write it"}
    )
    measure_s: float = field(default=45.0, metadata={"help": "for how long its steps are measured"})
    threads: int = field(default=0, metadata={"help": "threads of a worker on the CPU; 0: one for each core"})
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = field(
        default="auto", metadata={"help": "weights, as a worker's flag; auto: bfloat16 on a GPU, int8 on a CPU"}
    )
    kv_dtype: Literal["auto", "bfloat16", "int8", "float32", "fp8"] = field(
        default="auto", metadata={"help": "KV; auto: bfloat16; int8 on a CPU, fp8 on a GPU"}
    )
    kv_memory_share: float = field(
        default=0.0, metadata={"help": "of the memory that weights leave, for KV; 0: 0.85 of a GPU's, 0.3 of a CPU's"}
    )
    compute_share: float = field(
        default=0.0, metadata={"help": "of the device's operations a second that steps reach; 0: as known"}
    )
    memory_share: float = field(default=0.0, metadata={"help": "of the device's bandwidth that steps reach; 0: as known"})
    max_context: int = field(default=0, metadata={"help": "longest sequence in tokens; longer requests are cut; 0: the model's"})
    tensor_parallel: tuple[int, ...] = field(default=(), metadata={"help": "devices that share a model; empty: 1, 2, 4, 8"})
    max_num_seqs: tuple[int, ...] = field(
        default=(), metadata={"help": "sequences of a worker to be tried; empty: what is of use"}
    )
    max_num_batched_tokens: tuple[int, ...] = field(
        default=(), metadata={"help": "tokens of a step to be tried; empty: 512, 2048, 8192; a measured worker's own"}
    )

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        if not (self.device or self.speed or self.measure):
            raise ValueError("device: say how fast workers are: give a --device, a measured --speed, or --measure")
        if self.device and (self.speed or self.measure):
            raise ValueError("device: excludes a measured speed; give one of them")
        for name in ("kv_memory_share", "compute_share", "memory_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be a share from 0 to 1")
        for name in ("tensor_parallel", "max_num_seqs", "max_num_batched_tokens"):
            if any(number < 1 for number in getattr(self, name)):
                raise ValueError(f"{name}: give numbers of 1 or more, or nothing")
        for name in ("threads", "max_context"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative")
        if not 5 <= self.measure_s <= 3600:
            raise ValueError("measure_s: must be between 5 and 3600 seconds")


@dataclass(frozen=True)
class Load:
    """What comes; as the simulator's flags of the same names."""

    trace: str = field(default="", metadata={"help": "KIND=PATH, of azure-conv, azure-code, mooncake; empty: generated arrivals"})
    rate: str = field(default="", metadata={"help": "how fast requests come: 2x (as the trace, faster) or 50/s (on average)"})
    requests: int | None = field(default=None, metadata={"help": "requests; empty: those of the trace, or 4000"})
    input_tokens: float = field(default=1024, metadata={"help": "generated arrivals: mean length of prompts"})
    output_tokens: float = field(default=256, metadata={"help": "generated arrivals: mean length of outputs"})
    scatter: float = field(default=0.8, metadata={"help": "generated arrivals: sigma of the log-normal lengths; 0: all alike"})
    input_scale: float = field(default=1.0, metadata={"help": "prompts so many times as long"})
    output_scale: float = field(default=1.0, metadata={"help": "outputs so many times as long"})
    swing: str = field(default="", metadata={"help": "DEPTH@PERIOD: the rate swings; 0.5@86400: by half, once a day"})
    burst: str = field(default="", metadata={"help": "FACTOR@START: from that second on, for a minute, so many times as many"})
    seed: int = field(default=0, metadata={"help": "of generated arrivals and of the simulation"})

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        if not self.trace and not self.rate:
            raise ValueError("rate: say how many requests come, such as 5/s; or give a --trace")
        self.simulated(1, 1).validate()

    def simulated(self, ttft_ms: int, tpot_ms: int, *, routers: int = 1, handoff_gb_per_s: float = 5.0) -> SimulatorConfig:
        """The simulator's configuration for it; workers come later."""
        return SimulatorConfig(
            speed="-",
            decode=1,
            trace=self.trace,
            rate=self.rate or "1x",
            requests=self.requests if self.requests is not None or self.trace else _GENERATED,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            scatter=self.scatter,
            input_scale=self.input_scale,
            output_scale=self.output_scale,
            swing=self.swing,
            burst=self.burst,
            seed=self.seed,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            routers=routers,
            handoff_gb_per_s=handoff_gb_per_s,
        )

    @property
    def name(self) -> str:
        """In a few words."""
        return f"{self.trace.partition('=')[0]} {self.rate}".strip() if self.trace else f"generated, seed {self.seed}"


@dataclass(frozen=True)
class Promise:
    """What is to be kept, and at what price."""

    slo_ttft: str = field(metadata={"help": "objective for the time to the first token, such as 200ms"})
    slo_tpot: str = field(metadata={"help": "objective for the time per output token, such as 50ms"})
    quantile: float = field(default=0.99, metadata={"help": "share of requests that must keep both"})
    headroom: float = field(default=0.1, metadata={"help": "share by which the load may be higher and still be borne"})
    gpus: int = field(default=0, metadata={"help": "most devices; 0: as many as it takes"})
    price: float | None = field(default=None, metadata={"help": "of a device in an hour, in any currency"})
    mesh: Literal["any", "aggregated", "separated"] = field(
        default="any", metadata={"help": "workers that compute their prompts themselves, or prefill and decode apart"}
    )
    deployable: bool = field(default=False, metadata={"help": "only what pdmesh runs today, as with --overlay"})
    routers: int = field(default=1, metadata={"help": "routers, to which arrivals go in turn"})
    handoff_gb_per_s: float = field(default=5.0, metadata={"help": "bandwidth of hand-offs, 10^9 bytes a second"})
    effort: Literal["quick", "normal", "thorough"] = field(
        default="normal", metadata={"help": "how many meshes are simulated: within about 50,000, 100,000 or 600,000 requests"}
    )

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        for name in ("slo_ttft", "slo_tpot"):
            milliseconds(name, getattr(self, name))
        if not 0.5 <= self.quantile < 1:
            raise ValueError("quantile: must be a share from 0.5 to below 1")
        if not 0 <= self.headroom <= 10:
            raise ValueError("headroom: must be a share from 0 to 10")
        if self.price is not None and self.price <= 0:
            raise ValueError("price: must be more than 0")
        if self.gpus < 0 or self.routers < 1:
            raise ValueError("gpus: must not be negative" if self.gpus < 0 else "routers: must be at least 1")
        if self.handoff_gb_per_s <= 0:
            raise ValueError("handoff_gb_per_s: must be positive")

    @property
    def ttft_ms(self) -> int:
        """Whole milliseconds."""
        return milliseconds("slo_ttft", self.slo_ttft)

    @property
    def tpot_ms(self) -> int:
        """Whole milliseconds."""
        return milliseconds("slo_tpot", self.slo_tpot)


@dataclass(frozen=True)
class Output:
    """Where the plan goes."""

    report: str = field(default="", metadata={"help": "write the plan with its plots to this file: one HTML page"})
    overlay: str = field(default="", metadata={"help": "write an overlay for kustomize to this folder"})
    overlay_base: str = field(default="", metadata={"help": "overlay that it builds on; empty: k8s/overlays/gpu or cpu"})
    overlay_fixed: bool = field(
        default=False, metadata={"help": "overlay: as many workers as planned, and the autoscaler leaves them alone"}
    )
    model_name: str = field(default="", metadata={"help": "overlay: the model's name and folder in /models; empty: the model's"})
    json: bool = field(default=False, metadata={"help": "print JSON in place of tables"})

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        for name in ("report", "overlay"):
            path = getattr(self, name)
            if path and not Path(path).absolute().parent.is_dir():
                raise ValueError(f"{name}: {path} cannot be written; give a path in a folder that is there")
        if self.report and Path(self.report).is_dir():
            raise ValueError(f"report: {self.report} is a folder; give a file")
        if self.model_name and not _MODEL_NAME.fullmatch(self.model_name):
            raise ValueError(f"model_name: {self.model_name!r} is not 1 to 63 of A-Z a-z 0-9 . _ -")
