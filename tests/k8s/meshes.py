"""What stands in a cluster once something was applied: each overlay by itself, and each with all that can stand beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.k8s.kustomize import FOLDER, Manifest, containers_of, pod_of, render

BESIDE = ("components/service-monitor", "loadtest")
MESHES = {
    **{
        f"overlays/{name}": (f"overlays/{name}", *BESIDE)
        for name in ("cpu", "gpu", "gpu-image", "gpu-several", "gpu-vllm", "tls", "tracing")
    },
    "overlays/cpu/green": ("overlays/cpu", "overlays/cpu/green", *BESIDE),
}
"""The folders that are applied together, by the one that they are about."""
SCALED_BY_OTHERS = ("examples/hpa", "examples/keda")
EXAMPLES = ("examples/gateway", *SCALED_BY_OTHERS)
"""Each stands for itself: overlays/cpu, scaled by somebody else or behind a gateway."""


@dataclass(frozen=True)
class Workload:
    """A Deployment or Job."""

    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        """Of its pods."""
        return dict(self.manifest["spec"]["template"]["metadata"]["labels"])

    @property
    def pod(self) -> Manifest:
        """The specification of its pods."""
        pod = pod_of(self.manifest)
        assert pod is not None
        return pod

    @property
    def containers(self) -> list[Manifest]:
        """Those that come first among them."""
        return containers_of(self.manifest)

    def ports(self) -> dict[int, str]:
        """Name by number, of all its containers."""
        return {port["containerPort"]: port["name"] for container in self.containers for port in container.get("ports", ())}


@cache
def manifests(mesh: str) -> tuple[Manifest, ...]:
    """All that a mesh consists of. Not to be changed."""
    return tuple(manifest for folder in MESHES[mesh] for manifest in render(FOLDER / folder))


def of_kind(mesh: str, kind: str) -> list[Manifest]:
    """Those of one kind."""
    return [manifest for manifest in manifests(mesh) if manifest["kind"] == kind]


def workloads(mesh: str) -> list[Workload]:
    """All that have pods."""
    return [Workload(manifest) for manifest in manifests(mesh) if pod_of(manifest) is not None]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector (matchLabels alone are used) takes these labels; an empty one takes all."""
    assert selector.keys() <= {"matchLabels"}, selector
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def all_containers() -> Iterator[tuple[str, Workload, Manifest]]:
    """Of all meshes."""
    for mesh in MESHES:
        for workload in workloads(mesh):
            for container in workload.containers:
                yield mesh, workload, container
