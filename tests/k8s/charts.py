"""What helm makes of the chart."""

from __future__ import annotations

import subprocess

from tests.k8s.kustomize import CLUSTER_KINDS, FOLDER, Manifest
from tests.k8s.tools import HELM

CHART = FOLDER / "chart"
# Which values make which kustomization: of the chart's examples, after its defaults.
SAME = {
    "overlays/cpu": (),
    "overlays/gpu": ("gpu",),
    "overlays/gpu-image": ("gpu", "gpu-image"),
    "overlays/gpu-vllm": ("gpu", "gpu-vllm"),
    "overlays/tls": ("tls",),
    "overlays/tracing": ("tracing",),
    "examples/hpa": ("hpa",),
    "examples/keda": ("keda",),
    "examples/gateway": ("gateway",),
}


def helm(*arguments: str) -> str:
    """What helm prints. Raises RuntimeError with what it says of an error."""
    done = subprocess.run([str(HELM), *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def templated(*examples: str, values: tuple[str, ...] = (), release: str = "pdmesh", version: str = "1.34.0") -> str:
    """The manifests of a release in the namespace pdmesh, hooks and tests included."""
    files = [part for name in examples for part in ("-f", str(CHART / f"examples/{name}.yaml"))]
    sets = [part for value in values for part in ("--set", value)]
    return helm("template", release, str(CHART), "-n", "pdmesh", "--kube-version", version, *files, *sets)


def in_namespace(manifests: list[Manifest]) -> list[Manifest]:
    """The same with the namespace into which helm puts what names none."""
    for manifest in manifests:
        if manifest["kind"] not in CLUSTER_KINDS:
            manifest["metadata"].setdefault("namespace", "pdmesh")
    return manifests
