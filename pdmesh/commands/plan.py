"""`pdmesh plan`: what a deployment will take, before there is one."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pdmesh.commands.options import flat
from pdmesh.commands.plan_options import Load, Machine, Output, Promise
from pdmesh.models import registry
from pdmesh.planner import overlay, report_html, report_text
from pdmesh.planner.kinds import Limitation, measured_kinds, roofline_kinds
from pdmesh.planner.measure import MeasureError, measure
from pdmesh.planner.meshes import AGGREGATED, SEPARATED, WorkerKind
from pdmesh.planner.plan import EFFORTS, NoPlan, Plan, Task, goals_of, make_plan
from pdmesh.planner.subject import Money, Subject
from pdmesh.planner.traffic import Traffic, traffic_of
from pdmesh.planning.devices import Device, find_device
from pdmesh.planning.roofline import Roofline
from pdmesh.planning.roofline_model import Decoder, read_decoder
from pdmesh.simulator.config import SimulatorConfig
from pdmesh.simulator.workers.spec import WorkerSpec, read_spec
from pdmesh.terminal import palette

EXIT_NO_PLAN, EXIT_USAGE = 1, 2
_NEITHER = "neither --deployable nor --overlay"
_GPU_KV_SHARE, _CPU_KV_SHARE = 0.85, 0.3


@dataclass(frozen=True)
class Options:
    """Say what a deployment takes: pdmesh plan --device h100-sxm --trace azure-conv=FILE --slo-ttft 500ms --slo-tpot 50ms."""

    model: str = field(
        default=registry.DEFAULT_MODEL,
        metadata={"help": "known name, model folder, or a config.json alone, also as a bare word", "positional": True},
    )
    machine: Machine = field(default_factory=Machine, metadata=flat())
    load: Load = field(default_factory=Load, metadata=flat())
    promise: Promise = field(metadata=flat(), kw_only=True)
    output: Output = field(default_factory=Output, metadata=flat())


@dataclass(frozen=True)
class _Workers:
    """How workers are known: by a roofline, or measured."""

    decoder: Decoder | None
    roofline: Roofline | None = None
    spec: WorkerSpec | None = None
    speed: str = ""

    @property
    def device(self) -> Device | None:
        return None if self.roofline is None else self.roofline.device


def run(options: Options) -> int:
    """0: there is a plan; 1: nothing keeps the objectives; 2: wrong use."""
    try:
        _check_outputs(options.output)  # before the search: afterwards its result would be lost
        workers = _workers(options)
        if options.output.overlay:
            _base(options, workers)
        config = options.load.simulated(
            options.promise.ttft_ms,
            options.promise.tpot_ms,
            routers=options.promise.routers,
            handoff_gb_per_s=options.promise.handoff_gb_per_s,
        )
        traffic, notes = _traffic(config, _max_context(options, workers))
        task, more_notes = _task(options, workers, config, traffic)
        gc.freeze()  # as the simulator does: what is there stays, and what comes has no cycles
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


def _workers(options: Options) -> _Workers:
    machine = options.machine
    if machine.device:
        decoder = _decoder(options.model)
        return _Workers(decoder, roofline=_roofline(machine, decoder))
    # A measured worker's shapes matter for the memory in manifests alone.
    shapes = _decoder(options.model) if options.output.overlay else None
    if not machine.measure:
        return _Workers(shapes, spec=read_spec(machine.speed), speed=machine.speed)
    measured = measure(_engine(options.model, machine), machine.measure_s, _speed_file(machine))
    _note(f"written: {measured.written}, to be given as --speed")
    return _Workers(shapes, spec=measured.spec, speed=str(measured.written))


def _engine(model: str, machine: Machine) -> dict[str, str | int]:
    """Settings of the engine that is measured."""
    limits = {"max_num_seqs": machine.max_num_seqs, "max_num_batched_tokens": machine.max_num_batched_tokens}
    return {
        "model": model,
        "quantization": machine.quantization,
        "kv_dtype": machine.kv_dtype,
        "num_threads": machine.threads,
        "max_context": machine.max_context,
        **{name: max(values) for name, values in limits.items() if values},
    }


def _speed_file(machine: Machine) -> Path:
    return Path(machine.speed) if machine.speed else Path(tempfile.mkdtemp(prefix="pdmesh-plan-")) / "speed.json"


def _decoder(model: str) -> Decoder:
    """From a config.json, or from that of a folder or a known model, which is fetched if need be."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return read_decoder(path)
    if (path / "config.json").is_file():
        return read_decoder(path / "config.json")
    return read_decoder(registry.ensure_model(model) / "config.json")


def _roofline(machine: Machine, decoder: Decoder) -> Roofline:
    device = find_device(machine.device)
    compute_share, memory_share = machine.compute_share or device.compute_share, machine.memory_share or device.memory_share
    device = replace(device, compute_share=compute_share, memory_share=memory_share)
    auto = "none" if device.is_gpu else "int8"
    quantization = auto if machine.quantization == "auto" else machine.quantization
    _check_numbers(machine, device)
    weights = "bfloat16" if quantization == "none" else quantization
    # Weights of four bits are widened: on the CPU to eight, on a GPU to what activations are.
    products = "int8" if weights == "int8" or (weights == "int4" and not device.is_gpu) else "bfloat16"
    kv_dtype = "bfloat16" if machine.kv_dtype == "auto" else machine.kv_dtype
    return Roofline(device, decoder, weights, products, kv_dtype)


def _check_numbers(machine: Machine, device: Device) -> None:
    """Raises ValueError for those that workers on such a device refuse."""
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
    """Cut to what the model takes, and a note of how much of it was. Raises TraceError."""
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
        raise ValueError(f"tensor_parallel: it is untried over several GPUs yet; give 1, or {_NEITHER}")
    degrees = (1,) if deployable else machine.tensor_parallel
    limitation = Limitation(degrees, machine.max_num_seqs, machine.max_num_batched_tokens)
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
    """Raises ValueError for one that is not deployable."""
    asked = (AGGREGATED, SEPARATED) if promise.mesh == "any" else (promise.mesh,)
    if not deployable or workers.roofline is None or not workers.roofline.device.is_gpu:
        return asked
    if promise.mesh == SEPARATED:
        raise ValueError(f"mesh: the hand-off of KV between GPUs is untried yet; give aggregated, or {_NEITHER}")
    if workers.roofline.weights != "bfloat16":
        raise ValueError(f"quantization: such weights are untried on GPUs yet; give none, or {_NEITHER}")
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
    """Of a config.json its own or, where that says nothing, its folder's."""
    path = Path(model)
    if path.suffix != ".json":
        return registry.model_name(model)
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _show(options: Options, workers: _Workers, plan: Plan, subject: Subject) -> None:
    output = options.output
    if output.json:
        print(json.dumps(report_text.as_json(plan, subject)))
    else:
        print("\n".join(report_text.lines(plan, subject, palette(sys.stdout))))
    if output.report:
        _write_report(output.report, report_html.page(plan, subject), mode="w")
        _note(f"written: {output.report}")
    if output.overlay:
        base, name = _base(options, workers)
        served = overlay.Served(name, options.machine.threads, _kv_share(options, workers), output.overlay_fixed)
        for path in overlay.write(Path(output.overlay), base, plan, subject, served):
            _note(f"written: {path}")


def _check_outputs(output: Output) -> None:
    """Raises ValueError, OverlayError for what cannot be written. Leaves nothing behind."""
    if output.report:
        is_there = Path(output.report).exists()
        _write_report(output.report, "", mode="a")
        if not is_there:
            Path(output.report).unlink()
    if output.overlay:
        overlay.check(Path(output.overlay))


def _write_report(path: str, text: str, *, mode: Literal["w", "a"]) -> None:
    """Raises ValueError."""
    try:
        with Path(path).open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"report: {path}: {error.strerror}; give a file that can be written") from error


def _base(options: Options, workers: _Workers) -> tuple[Path, str]:
    """The overlay to build on, and the model's name there. Raises OverlayError."""
    output, is_gpu = options.output, workers.device is not None and workers.device.is_gpu
    base = overlay.base_of(output.overlay_base, is_gpu=is_gpu)
    return base, overlay.served_name(output.model_name, _name(options.model), is_gpu=is_gpu, has_base=bool(output.overlay_base))


def _note(text: str) -> None:
    print(f"pdmesh plan: {text}", file=sys.stderr, flush=True)
