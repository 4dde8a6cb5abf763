"""Writes a plan as an overlay for kustomize, on an existing overlay. Pure except for finding and writing files.

It contains only what the chosen mesh decides: workers, limits of batches, KV, objectives, admission limits. The rest is the
base's.

The autoscaler owns the replicas: a number in a manifest would return with each `kubectl apply`, as if a person had set it. So the
overlay sets which pools there are and their bounds; or, `fixed`, the manifests have numbers and an annotation by which the
autoscaler leaves them alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pdmesh
from pdmesh.models.catalogue import DEFAULT_MODEL
from pdmesh.planner import report_text
from pdmesh.planner.meshes import WorkerKind
from pdmesh.planner.plan import Plan
from pdmesh.planner.traffic import Subject
from pdmesh.planner.trial import max_inflight
from pdmesh.worker.engines.registry import DEFAULT_ENGINE

HEADER = "# Written by `pdmesh plan`"
CPU_MODEL = "smollm2"
"""The only model that the image of k8s/overlays/cpu serves."""
_BESIDE_MB = 1536
"""Memory of a worker besides weights and KV."""
_OVERHEAD_CORES = 1
_ROOM = 2
"""Multiple of the planned size to which the autoscaler may grow a pool."""

_NO_PREFILL = """# The others compute their prompts themselves; the autoscaler does not look at this one.
apiVersion: apps/v1
kind: Deployment
metadata:
  name: pdmesh-prefill
spec:
  replicas: 0
"""


class OverlayError(Exception):
    """Raised when it cannot be written: why, and what to do."""


@dataclass(frozen=True)
class Served:
    """Describe the model for the manifests: `name`, in the folder /models/NAME of the workers. `threads` of each worker on the
    CPU, 0: as the base has it. `kv_share`: of the memory of a GPU. `fixed`: as many workers as planned, whatever the load.
    `overrides`: of keys of the model's config.json. `engine`: of the workers."""

    name: str
    threads: int
    kv_share: float
    fixed: bool = False
    overrides: tuple[str, ...] = ()
    engine: str = DEFAULT_ENGINE


def base_of(folder: str, *, is_gpu: bool, engine: str = DEFAULT_ENGINE) -> Path:
    """Return the overlay to build on: the given one, or the repository's, which has the image with the engine. Raises
    OverlayError."""
    name = "gpu" if is_gpu else "cpu"
    if engine != DEFAULT_ENGINE:
        if not is_gpu and not folder:
            raise OverlayError(f"overlay_base: no overlay has {engine} on a CPU; give one that has, or a --device that is a GPU")
        name = f"gpu-{engine}"
    source = Path(pdmesh.__file__).resolve().parents[1] / "k8s" / "overlays" / name
    candidates = [Path(folder)] if folder else [Path("k8s/overlays") / name, source]
    found = next((path for path in candidates if (path / "kustomization.yaml").is_file()), None)
    if found is None:
        raise OverlayError(
            f"overlay_base: {candidates[0]} holds no kustomization.yaml; give a folder such as k8s/overlays/{name}"
        )
    return found


def served_name(asked: str, model: str, *, is_gpu: bool, has_base: bool) -> str:
    """Return the model's name in the manifests. Raises OverlayError for one that the CPU overlay lacks."""
    if is_gpu or has_base:
        return asked or model
    if (asked or model) not in (CPU_MODEL, DEFAULT_MODEL):
        raise OverlayError(
            f"overlay_base: k8s/overlays/cpu serves {CPU_MODEL} from an image and nothing else; give an overlay that has {model}"
        )
    return CPU_MODEL


def check(folder: Path) -> None:
    """Raise OverlayError for a folder with foreign files, or one that cannot be written. Leaves nothing behind."""
    old, is_there = folder / "kustomization.yaml", folder.exists()
    with _named_errors():
        if old.exists() and not old.read_text(encoding="utf-8").startswith(HEADER):
            raise OverlayError(f"overlay: {old} was not written by pdmesh plan; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        finally:
            if not is_there:
                folder.rmdir()


def write(folder: Path, base: Path, plan: Plan, subject: Subject, served: Served) -> list[Path]:
    """Write the files; return them. Raises OverlayError."""
    files = contents(os.path.relpath(base, folder), plan, subject, served)
    check(folder)
    with _named_errors():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Convert OSError to OverlayError."""
    try:
        yield
    except OSError as error:
        raise OverlayError(f"overlay: {error.filename}: {error.strerror}; give a folder that can be written") from error


def contents(base: str, plan: Plan, subject: Subject, served: Served) -> dict[str, str]:
    """Return text by name of the file; `base` as seen from there. Raises OverlayError for a mesh that pdmesh does not run."""
    problem = report_text.why_not_deployable(plan.chosen.point, subject.device, subject.weights)
    if problem is not None:
        raise OverlayError(
            f"overlay: the chosen mesh does not run today: {problem}; give --deployable, which plans with what does"
        )
    patches = {
        "workers.yaml": "---\n".join(_workers(plan, subject, served)),
        "autoscaler.yaml": _autoscaler(plan),
        "router.yaml": _router(plan, served),
        "objectives.yaml": _objectives(plan, served),
    }
    return {"kustomization.yaml": _kustomization(base, plan, subject, list(patches)), **patches}


def _kustomization(base: str, plan: Plan, subject: Subject, patches: list[str]) -> str:
    goal, point = plan.task.settings.objective, plan.chosen.point
    assert goal is not None
    listed = "\n".join(f"  - path: {name}" for name in patches)
    return f"""{HEADER}: {subject.title}
# {traffic_line(plan, subject)}
# TTFT {goal.ttft_ms} ms and TPOT {goal.tpot_ms} ms for {plan.task.quantile:g} of them
# {point.name} {point.shape.mesh}, {point.cost} {subject.unit}
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: pdmesh
resources:
  - {base}
patches:
{listed}
"""


def traffic_line(plan: Plan, subject: Subject) -> str:
    """Return the load of the plan."""
    traffic = plan.task.traffic
    return f"{len(traffic.arrivals)} requests, {subject.load}, {traffic.rate_per_s:.3g}/s and {plan.task.headroom:.0%} more"


def _workers(plan: Plan, subject: Subject, served: Served) -> list[str]:
    shape, size = plan.chosen.point.shape, plan.chosen.point.size
    if shape.prefill is not None:
        decode = _worker("decode", "decode", size.num_decode, shape.decode, subject, served)
        return [decode, _worker("prefill", "prefill", size.num_prefill, shape.prefill, subject, served)]
    both = _worker("decode", "prefill,decode", size.num_decode, shape.decode, subject, served)
    return [both] if _is_gpu(subject) else [both, _NO_PREFILL]  # on GPUs there is none to begin with


def _autoscaler(plan: Plan) -> str:
    """Return the autoscaler's pools and their bounds. The planned size is the minimum: it must exist before the load comes."""
    shape, size = plan.chosen.point.shape, plan.chosen.point.size
    pools = {"BOTH": size.num_decode}
    if shape.prefill is not None:
        pools = {"PREFILL": size.num_prefill, "DECODE": size.num_decode}
    max_devices = plan.task.max_cost or _ROOM * plan.chosen.point.cost
    settings = {
        "PDMESH_KUBERNETES_BOTH_DEPLOYMENT": "" if shape.prefill else "pdmesh-decode",
        **{f"PDMESH_{pool}_MIN_REPLICAS": num for pool, num in pools.items()},
        **{f"PDMESH_{pool}_MAX_REPLICAS": max(num, min(_ROOM * num, max_devices)) for pool, num in pools.items()},
        "PDMESH_MAX_GPUS": max_devices,
    }
    return f"""apiVersion: apps/v1
kind: Deployment
metadata:
  name: pdmesh-autoscaler
spec:
  template:
    spec:
      containers:
        - name: autoscaler
          env:
{_env(settings)}
"""


def _env(settings: Mapping[str, str | int]) -> str:
    return "\n".join(
        f"            - name: {name}\n              value: {json.dumps(str(value))}" for name, value in settings.items()
    )


def _worker(pool: str, roles: str, replicas: int, kind: WorkerKind, subject: Subject, served: Served) -> str:
    settings = {
        **({"PDMESH_ENGINE": served.engine} if served.engine != DEFAULT_ENGINE else {}),
        "PDMESH_ROLES": roles,
        "PDMESH_MODEL": f"/models/{served.name}",
        "PDMESH_MODEL_NAME": served.name,
        "PDMESH_MAX_NUM_SEQS": str(kind.spec.max_num_seqs),
        "PDMESH_MAX_NUM_BATCHED_TOKENS": str(kind.spec.max_num_batched_tokens),
        **_memory(kind, subject, served),
        **({"PDMESH_OVERRIDE": "\n".join(served.overrides)} if served.overrides else {}),
    }
    annotations = '  annotations:\n    pdmesh.io/autoscale: "off"\n' if served.fixed else ""
    return f"""apiVersion: apps/v1
kind: Deployment
metadata:
  name: pdmesh-{pool}
{annotations}spec:
  replicas: {replicas if served.fixed else "null"}
  template:
    spec:
      containers:
        - name: {pool}
          env:
{_env(settings)}
{_resources(kind, subject, served)}"""


def _memory(kind: WorkerKind, subject: Subject, served: Served) -> dict[str, str]:
    """Return on a GPU the planned share of the memory that is free after loading; else MiB. Another engine may mean another share
    by it, so it gets MiB."""
    if _is_gpu(subject) and served.engine == DEFAULT_ENGINE:
        return {"PDMESH_KV_MEMORY_SHARE": f"{served.kv_share:g}"}
    return {"PDMESH_KV_MEMORY_MB": str(_kv_mb(kind))}


def _resources(kind: WorkerKind, subject: Subject, served: Served) -> str:
    """Return the resources: planned ones of a worker on the CPU; the base requests one GPU."""
    if _is_gpu(subject):
        return ""
    memory = f"{_kv_mb(kind) + _held_mb(subject) + _BESIDE_MB}Mi"
    cores = {"requests": served.threads, "limits": served.threads + _OVERHEAD_CORES}
    lines = ["          resources:"]
    for group, num in cores.items():
        lines.append(f"            {group}:")
        lines += [f'              cpu: "{num}"'] if served.threads else []
        lines.append(f"              memory: {memory}")
    return "\n".join(lines) + "\n"


def _is_gpu(subject: Subject) -> bool:
    return subject.device is not None and subject.device.is_gpu


def _kv_mb(kind: WorkerKind) -> int:
    return max(1, kind.kv_tokens * kind.spec.kv_bytes_per_token // 2**20)


def _held_mb(subject: Subject) -> int:
    """Return the weights' size, twice while they are loaded: as in the file, and in the computing format."""
    if subject.decoder is None:
        raise OverlayError("overlay: needs --model, to know how much memory a worker takes")
    return 2 * subject.decoder.num_parameters * 2 // 2**20


def _router(plan: Plan, served: Served) -> str:
    num = max_inflight(plan.chosen.point)
    return f"""apiVersion: apps/v1
kind: Deployment
metadata:
  name: pdmesh-router
spec:
  template:
    spec:
      containers:
        - name: router
          env:
            - name: PDMESH_MODELS
              value: {served.name}=/models/{served.name}
            # For each router all of it: they do not know of each other's requests.
            - name: PDMESH_MAX_INFLIGHT
              value: "{num}"
            - name: PDMESH_MAX_QUEUED
              value: "{num}"
"""


def _objectives(plan: Plan, served: Served) -> str:
    goal = plan.task.settings.objective
    assert goal is not None
    return f"""apiVersion: v1
kind: ConfigMap
metadata:
  name: pdmesh-objectives
data:
  objectives.toml: |
    ["{served.name}"]
    ttft_ms = {goal.ttft_ms}
    tpot_ms = {goal.tpot_ms}
    quantile = {plan.task.quantile}
"""
