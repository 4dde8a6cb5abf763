"""Which process speaks, on every span and metric that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from pdmesh.runtime.telemetry.spans import Attributes, Value


def resource_of(instance_id: str, mesh: str, roles: Sequence[str], epoch: int | None = None) -> Attributes:
    """`instance_id` is the name of the router, worker or autoscaler; `epoch` tells its incarnations apart."""
    attributes: dict[str, Value] = {
        "service.instance.id": instance_id,
        "service.namespace": "pdmesh",
        "service.version": _version(),
        "pdmesh.mesh": mesh,
        "pdmesh.roles": list(roles),
    }
    if epoch is not None:
        attributes["pdmesh.epoch"] = f"{epoch:016x}"
    return attributes


def _version() -> str:
    try:
        return metadata.version("pdmesh")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
