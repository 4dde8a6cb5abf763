"""`pdmesh plan`: finds the mesh that a deployment needs, before there is one."""

from __future__ import annotations

import gc
import json
import math
import re
import sys
import tempfile
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pdmesh import overrides
from pdmesh.commands.options import flat
from pdmesh.models import registry
from pdmesh.models.registry import check_headers
from pdmesh.planner import overlay, report_html, report_text
from pdmesh.planner.measure import MeasureError, measure
from pdmesh.planner.meshes import AGGREGATED, SEPARATED, Limitation, WorkerKind, measured_kinds, roofline_kinds
from pdmesh.planner.plan import EFFORTS, NoPlan, Plan, Task, goals_of, make_plan
from pdmesh.planner.shapes import read_decoder
from pdmesh.planner.traffic import Money, Subject, Traffic, traffic_of
from pdmesh.planning.devices import Device, find_device
from pdmesh.planning.latency_model import MAX_PER_ROW, Drafts
from pdmesh.planning.roofline import Decoder, Roofline
from pdmesh.simulator.config import SimulatorConfig
from pdmesh.simulator.workers.spec import WorkerSpec, read_spec
from pdmesh.terminal import show
from pdmesh.worker.engines.registry import DEFAULT_ENGINE, ENGINES

# Durations as people write objectives: 200ms, 0.2s.


_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s)")
_MILLISECONDS = {"ms": 1.0, "s": 1000.0}


def milliseconds(name: str, text: str) -> int:
    """Return whole milliseconds, as objectives have them. Raises ValueError that begins with `name`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{name}: {text!r} is not a duration; give one such as 200ms or 0.2s")
    value = float(match[1]) * _MILLISECONDS[match[2]]
    if not 1 <= value < 2**32 or value != round(value):
        raise ValueError(f"{name}: {text!r} is not a whole number of milliseconds, at least one")
    return round(value)


# The options, in groups: model and devices, load, objectives, output.


_GENERATED = 4000
"""Requests to generate by default."""
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class Machine:
    """Say where it runs, and how fast."""

    device: str = field(
        default="", metadata={"help": "known device (an unknown name lists them) or .json file that describes one"}
    )
    speed: str = field(
        default="", metadata={"help": "JSON file of a measured worker (pdmesh/simulator/workers/spec.py), in place of --device"}
    )
    engine: str = field(default=DEFAULT_ENGINE, metadata={"help": "of the workers: pdmesh or vllm", "choices": ENGINES})
    measure: bool = field(
        default=False, metadata={"help": "measure a worker on this machine first; --speed says where to write it"}
    )
    measure_s: float = field(default=45.0, metadata={"help": "for how long its steps are measured"})
    threads: int = field(default=0, metadata={"help": "threads of a worker on the CPU; 0: one for each core"})
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = field(
        default="auto", metadata={"help": "weights, as a worker's flag; auto: bfloat16 on a GPU, int8 on a CPU"}
    )
    kv_dtype: Literal["auto", "bfloat16", "int8", "float32", "fp8"] = field(
        default="auto", metadata={"help": "KV, as a worker's flag; auto: bfloat16 on a GPU, on a CPU int8 where the model allows"}
    )
    kv_memory_share: float = field(
        default=0.0, metadata={"help": "of the memory that weights leave, for KV; 0: 0.85 of a GPU's, 0.3 of a CPU's"}
    )
    compute_share: float = field(
        default=0.0, metadata={"help": "of the device's operations a second that steps reach; 0: as known"}
    )
    memory_share: float = field(default=0.0, metadata={"help": "of the device's bandwidth that steps reach; 0: as known"})
    tokens_per_row: float = field(
        default=0.0, metadata={"help": "speculation: tokens that a sequence gets from a step (pdmesh status); 0: no speculation"}
    )
    computed_per_row: float = field(default=0.0, metadata={"help": "speculation: tokens computed for it, drafted ones included"})
    max_context: int = field(default=0, metadata={"help": "longest sequence in tokens; longer requests are cut; 0: the model's"})
    tensor_parallel: tuple[int, ...] = field(default=(), metadata={"help": "devices that share a model; empty: 1, 2, 4, 8"})
    max_num_seqs: tuple[int, ...] = field(
        default=(), metadata={"help": "sequences of a worker to be tried; empty: what is of use"}
    )
    max_num_batched_tokens: tuple[int, ...] = field(
        default=(), metadata={"help": "tokens of a step to be tried; empty: 512, 2048, 8192; a measured worker's own"}
    )

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        if not (self.device or self.speed or self.measure):
            raise ValueError("device: say how fast workers are: give a --device, a measured --speed, or --measure")
        if self.device and (self.speed or self.measure):
            raise ValueError("device: excludes a measured speed; give one of them")
        if self.engine != DEFAULT_ENGINE:
            _check_other_engine(self)
        for name in ("kv_memory_share", "compute_share", "memory_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be a share from 0 to 1")
        if (self.tokens_per_row or self.computed_per_row) and not (
            1 <= self.tokens_per_row <= self.computed_per_row <= MAX_PER_ROW
        ):
            raise ValueError(f"tokens_per_row: give at least 1, and --computed-per-row at least as many, up to {MAX_PER_ROW:g}")
        for name in ("tensor_parallel", "max_num_seqs", "max_num_batched_tokens"):
            if any(number < 1 for number in getattr(self, name)):
                raise ValueError(f"{name}: give numbers of 1 or more, or nothing")
        for name in ("threads", "max_context"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative")
        if not 5 <= self.measure_s <= 3600:
            raise ValueError("measure_s: must be between 5 and 3600 seconds")


def _check_other_engine(machine: Machine) -> None:
    """Raise ValueError, naming the field, for what cannot be planned for workers with another engine than ours."""
    if machine.measure:
        raise ValueError(f"measure: measures pdmesh's own engine, not {machine.engine}; give --device or a measured --speed")
    if machine.quantization not in ("auto", "none"):
        raise ValueError(f"quantization: {machine.engine} computes in bfloat16 here; give none or auto")
    if machine.kv_dtype not in ("auto", "bfloat16"):
        raise ValueError(f"kv_dtype: KV of {machine.engine} is as wide as activations; give bfloat16 or auto")


@dataclass(frozen=True)
class Load:
    """Describe the load; as the simulator's flags of the same names."""

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
        """Raise ValueError that names the field."""
        if not self.trace and not self.rate:
            raise ValueError("rate: say how many requests come, such as 5/s; or give a --trace")
        self.simulated(1, 1).validate()

    def simulated(self, ttft_ms: int, tpot_ms: int) -> SimulatorConfig:
        """Return the simulator's configuration for it; workers and bandwidths are added later."""
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
        )

    @property
    def name(self) -> str:
        """Return it in a few words."""
        return f"{self.trace.partition('=')[0]} {self.rate}".strip() if self.trace else f"generated, seed {self.seed}"


@dataclass(frozen=True)
class Promise:
    """Set the objectives, the headroom and the price."""

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
    fetch_gb_per_s: float = field(
        default=0.0,
        metadata={"help": "at which prefill workers fetch KV from others, 10^9 bytes a second; 0: they do not"},
    )
    tier_gb: float = field(
        default=0.0, metadata={"help": "host memory and disk for KV beneath each worker's pool, 10^9 bytes; 0: none"}
    )
    tier_gb_per_s: float = field(
        default=2.0, metadata={"help": "bandwidth at which KV is restored from there, 10^9 bytes a second"}
    )
    effort: Literal["quick", "normal", "thorough"] = field(
        default="normal", metadata={"help": "how many meshes are simulated: within about 50,000, 100,000 or 600,000 requests"}
    )

    def validate(self) -> None:
        """Raise ValueError that names the field."""
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
        for name in ("handoff_gb_per_s", "tier_gb_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be positive")
        for name in ("fetch_gb_per_s", "tier_gb"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must not be negative")

    @property
    def ttft_ms(self) -> int:
        """Return whole milliseconds."""
        return milliseconds("slo_ttft", self.slo_ttft)

    @property
    def tpot_ms(self) -> int:
        """Return whole milliseconds."""
        return milliseconds("slo_tpot", self.slo_tpot)


@dataclass(frozen=True)
class Output:
    """Say where the plan is written."""

    report: str = field(default="", metadata={"help": "write the plan with its plots to this file: one HTML page"})
    overlay: str = field(default="", metadata={"help": "write an overlay for kustomize to this folder"})
    overlay_base: str = field(
        default="", metadata={"help": "overlay that it builds on; empty: k8s/overlays/gpu, gpu-vllm or cpu"}
    )
    overlay_fixed: bool = field(
        default=False, metadata={"help": "overlay: as many workers as planned, and the autoscaler leaves them alone"}
    )
    model_name: str = field(default="", metadata={"help": "overlay: the model's name and folder in /models; empty: the model's"})
    json: bool = field(default=False, metadata={"help": "print JSON in place of tables"})

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        for name in ("report", "overlay"):
            path = getattr(self, name)
            if path and not Path(path).absolute().parent.is_dir():
                raise ValueError(f"{name}: {path} cannot be written; give a path in a folder that is there")
        if self.report and Path(self.report).is_dir():
            raise ValueError(f"report: {self.report} is a folder; give a file")
        if self.model_name and not _MODEL_NAME.fullmatch(self.model_name):
            raise ValueError(f"model_name: {self.model_name!r} is not 1 to 63 of A-Z a-z 0-9 . _ -")


EXIT_NO_PLAN, EXIT_USAGE = 1, 2
_NEITHER = "neither --deployable nor --overlay"
_GPU_KV_SHARE, _CPU_KV_SHARE = 0.85, 0.3


@dataclass(frozen=True)
class Options:
    """Say what a deployment takes: pdmesh plan --device h100-sxm --trace azure-conv=FILE --slo-ttft 500ms --slo-tpot 50ms."""

    model: str = field(
        default=registry.DEFAULT_MODEL,
        metadata={
            "help": "known name, model folder, .gguf file, or a config.json alone, also as a bare word",
            "positional": True,
        },
    )
    override: tuple[str, ...] = field(default=(), metadata={"help": overrides.HELP, "repeated": True})
    machine: Machine = field(default_factory=Machine, metadata=flat())
    load: Load = field(default_factory=Load, metadata=flat())
    promise: Promise = field(metadata=flat(), kw_only=True)
    output: Output = field(default_factory=Output, metadata=flat())

    def validate(self) -> None:
        """Raise ValueError that names the field."""
        overrides.check(self.override)
        if self.machine.engine != DEFAULT_ENGINE and self.override:
            raise ValueError(f"override: {self.machine.engine} is not told of overrides; change config.json, or leave it out")


@dataclass(frozen=True)
class _Workers:
    """Hold how workers are known: by a roofline, or measured."""

    decoder: Decoder | None
    roofline: Roofline | None = None
    spec: WorkerSpec | None = None
    speed: str = ""

    @property
    def device(self) -> Device | None:
        return None if self.roofline is None else self.roofline.device


def run(options: Options) -> int:
    """Run the command; return 0: there is a plan; 1: nothing keeps the objectives; 2: wrong use."""
    try:
        _check_outputs(options.output)  # before the search: afterwards its result would be lost
        workers = _workers(options)
        if options.output.overlay:
            _base(options, workers)
        config = _simulated(options)
        traffic, notes = _traffic(config, _max_context(options, workers))
        task, more_notes = _task(options, workers, config, traffic)
        gc.freeze()  # as the simulator does: existing objects stay, and new ones have no cycles
        gc.set_threshold(200_000, 20, 20)
        plan = make_plan(task, _note)
        subject = _subject(options, workers, (*notes, *more_notes))
        _show(options, workers, plan, subject)
    except NoPlan as error:
        print(f"pdmesh plan: {error}", file=sys.stderr)
        return EXIT_NO_PLAN
    except (MeasureError, registry.ModelError, overlay.OverlayError, ValueError) as error:
        print(f"pdmesh plan: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _simulated(options: Options) -> SimulatorConfig:
    """Return the simulator's configuration; workers are added later."""
    promise = options.promise
    config = options.load.simulated(promise.ttft_ms, promise.tpot_ms)
    same = ("routers", "handoff_gb_per_s", "fetch_gb_per_s", "tier_gb", "tier_gb_per_s")
    return replace(config, **{name: getattr(promise, name) for name in same})


def _workers(options: Options) -> _Workers:
    machine = options.machine
    if machine.device:
        decoder = _decoder(options)
        return _Workers(decoder, roofline=planned_roofline(machine, decoder))
    # A measured worker's shapes matter only for the memory in manifests.
    shapes = _decoder(options) if options.output.overlay else None
    if not machine.measure:
        return _Workers(shapes, spec=read_spec(machine.speed), speed=machine.speed)
    measured = measure(_engine(options, machine), machine.measure_s, _speed_file(machine))
    _note(f"written: {measured.written}, to be given as --speed")
    return _Workers(shapes, spec=measured.spec, speed=str(measured.written))


def _engine(options: Options, machine: Machine) -> dict[str, str | int | list[str]]:
    """Return the settings of the engine that is measured."""
    limits = {"max_num_seqs": machine.max_num_seqs, "max_num_batched_tokens": machine.max_num_batched_tokens}
    return {
        "model": options.model,
        "override": list(options.override),
        "quantization": machine.quantization,
        "kv_dtype": machine.kv_dtype,
        "num_threads": machine.threads,
        "max_context": machine.max_context,
        **{name: max(values) for name, values in limits.items() if values},
    }


def _speed_file(machine: Machine) -> Path:
    return Path(machine.speed) if machine.speed else Path(tempfile.mkdtemp(prefix="pdmesh-plan-")) / "speed.json"


def _decoder(options: Options) -> Decoder:
    """Return the decoder from a config.json, or from that of a folder or a known model, which is fetched if needed, or from a
    .gguf file's header. Raises ModelError or ShapeError, as workers would refuse it."""
    path = Path(options.model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return read_decoder(path, options.override)
    if not (path / "config.json").is_file() and path.suffix.lower() != ".gguf":
        path = registry.ensure_model(options.model)
    _check_headers(path, options.override)
    return read_decoder(path / "config.json" if path.is_dir() else path, options.override)


def _check_headers(path: Path, given: tuple[str, ...]) -> None:
    """Raise ModelError for weights that workers refuse by their headers: in a child process, where torch is installed. A
    config.json without weights is enough for a plan."""
    has_weights = path.is_file() or any(path.glob("*.safetensors*")) or any(path.glob("*.bin"))
    if has_weights and find_spec("torch") is not None:
        check_headers(path, given)


def planned_roofline(machine: Machine, decoder: Decoder) -> Roofline:
    """Return the speed of workers on a known device, in the formats that they choose by themselves where the machine names none.
    Raises ValueError naming the field, DeviceError."""
    device = find_device(machine.device)
    compute_share, memory_share = machine.compute_share or device.compute_share, machine.memory_share or device.memory_share
    device = replace(device, compute_share=compute_share, memory_share=memory_share)
    auto = "none" if device.is_gpu or machine.engine != DEFAULT_ENGINE else "int8"
    quantization = auto if machine.quantization == "auto" else machine.quantization
    _check_numbers(machine, device)
    weights = "bfloat16" if quantization == "none" else quantization
    # Weights of four bits are widened: on the CPU to eight, on a GPU to the format of activations.
    products = "int8" if weights == "int8" or (weights == "int4" and not device.is_gpu) else "bfloat16"
    is_narrow = not device.is_gpu and weights != "bfloat16" and decoder.suits_int8_kv  # as workers choose
    auto_kv = "int8" if is_narrow else "bfloat16"
    return Roofline(device, decoder, weights, products, auto_kv if machine.kv_dtype == "auto" else machine.kv_dtype)


def _check_numbers(machine: Machine, device: Device) -> None:
    """Raise ValueError for settings that workers on such a device reject."""
    if machine.quantization == "fp8" and not device.is_gpu:
        raise ValueError(f"quantization: fp8 is for GPUs, {device.name} is none; give int8, int4, none or auto")
    missing = "int8" if device.is_gpu else "fp8"
    if machine.kv_dtype == missing:
        kind, given = ("CPUs", "fp8") if device.is_gpu else ("GPUs", "int8")
        raise ValueError(f"kv_dtype: {missing} is for {kind}, {device.name} is none; give {given} or auto")


def _max_context(options: Options, workers: _Workers) -> int:
    known = (
        workers.spec.largest if workers.spec is not None else workers.decoder.max_context if workers.decoder is not None else 0
    )
    asked = options.machine.max_context
    return min(asked, known) if asked else known


def _traffic(config: SimulatorConfig, max_context: int) -> tuple[Traffic, list[str]]:
    """Return the traffic, cut to the model's context, and a note of how much was cut. Raises TraceError."""
    traffic = traffic_of(config.arrivals(max_context))
    num_cut = sum(arrival.num_input + arrival.num_output >= max_context for arrival in traffic.arrivals)
    return traffic, [f"{num_cut} requests were cut to {max_context} tokens"] if num_cut else []


def _task(options: Options, workers: _Workers, config: SimulatorConfig, traffic: Traffic) -> tuple[Task, list[str]]:
    promise, machine = options.promise, options.machine
    settings = config.mesh()
    assert settings.objective is not None
    settings = replace(settings, objective=replace(settings.objective, quantile=promise.quantile))
    goals = goals_of(promise.ttft_ms, promise.tpot_ms, promise.quantile, settings)
    deployable = promise.deployable or bool(options.output.overlay)
    if deployable and set(machine.tensor_parallel) - {1}:
        raise ValueError(f"tensor_parallel: it is not tested on several GPUs yet; give 1, or {_NEITHER}")
    degrees = (1,) if deployable else machine.tensor_parallel
    drafts = Drafts(machine.tokens_per_row or 1.0, machine.computed_per_row or 1.0)
    limitation = Limitation(degrees, machine.max_num_seqs, machine.max_num_batched_tokens, drafts)
    kinds: list[WorkerKind]
    notes: list[str] = []
    if workers.roofline is not None:
        context = _max_context(options, workers)
        kinds, notes = roofline_kinds(workers.roofline, limitation, _kv_share(options, workers), context, traffic, goals)
        if not kinds:
            raise NoPlan("; ".join(notes) + "; choose a larger device, more --tensor-parallel, or a shorter --max-context")
    else:
        assert workers.spec is not None
        kinds = measured_kinds(workers.spec, limitation)
    meshes = _meshes(promise, workers, deployable=deployable)
    return Task(
        traffic, tuple(kinds), settings, promise.quantile, promise.headroom, meshes, promise.gpus, EFFORTS[promise.effort]
    ), notes


def _meshes(promise: Promise, workers: _Workers, *, deployable: bool) -> tuple[str, ...]:
    """Return the kinds of mesh. Raises ValueError for one that is not deployable."""
    asked = (AGGREGATED, SEPARATED) if promise.mesh == "any" else (promise.mesh,)
    if not deployable or workers.roofline is None or not workers.roofline.device.is_gpu:
        return asked
    if promise.mesh == SEPARATED:
        raise ValueError(f"mesh: the KV hand-off between GPUs is not tested yet; give aggregated, or {_NEITHER}")
    if workers.roofline.weights != "bfloat16":
        raise ValueError(f"quantization: such weights are not tested on GPUs yet; give none, or {_NEITHER}")
    return (AGGREGATED,)


def _kv_share(options: Options, workers: _Workers) -> float:
    is_gpu = workers.device is not None and workers.device.is_gpu
    return options.machine.kv_memory_share or (_GPU_KV_SHARE if is_gpu else _CPU_KV_SHARE)


def _subject(options: Options, workers: _Workers, notes: tuple[str, ...]) -> Subject:
    return Subject(
        model=_name(options.model),
        load=options.load.name,
        weights=workers.roofline.weights if workers.roofline is not None else "as measured",
        device=workers.device,
        decoder=workers.decoder,
        speed=workers.speed,
        money=Money(options.promise.price),
        notes=notes,
    )


def _name(model: str) -> str:
    """Return the name in a config.json or, without one, that of its folder."""
    path = Path(model)
    if path.suffix != ".json":
        return registry.model_name(model)
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _show(options: Options, workers: _Workers, plan: Plan, subject: Subject) -> None:
    output = options.output
    if output.json:
        print(json.dumps(report_text.as_json(plan, subject)))
    else:
        show(*report_text.lines(plan, subject), width=report_text.WIDTH)
    if output.report:
        _write_report(output.report, report_html.page(plan, subject), mode="w")
        _note(f"written: {output.report}")
    if output.overlay:
        base, name = _base(options, workers)
        served = overlay.Served(
            name,
            options.machine.threads,
            _kv_share(options, workers),
            output.overlay_fixed,
            options.override,
            options.machine.engine,
        )
        for path in overlay.write(Path(output.overlay), base, plan, subject, served):
            _note(f"written: {path}")


def _check_outputs(output: Output) -> None:
    """Raise ValueError or OverlayError for outputs that cannot be written. Leaves nothing behind."""
    if output.report:
        is_there = Path(output.report).exists()
        _write_report(output.report, "", mode="a")
        if not is_there:
            Path(output.report).unlink()
    if output.overlay:
        overlay.check(Path(output.overlay))


def _write_report(path: str, text: str, *, mode: Literal["w", "a"]) -> None:
    """Write the report. Raises ValueError."""
    try:
        with Path(path).open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"report: {path}: {error.strerror}; give a file that can be written") from error


def _base(options: Options, workers: _Workers) -> tuple[Path, str]:
    """Return the overlay to build on, and the model's name there. Raises OverlayError."""
    output, is_gpu = options.output, workers.device is not None and workers.device.is_gpu
    base = overlay.base_of(output.overlay_base, is_gpu=is_gpu, engine=options.machine.engine)
    return base, overlay.served_name(output.model_name, _name(options.model), is_gpu=is_gpu, has_base=bool(output.overlay_base))


def _note(text: str) -> None:
    print(f"pdmesh plan: {text}", file=sys.stderr, flush=True)
