"""Reads Deployments from the API's JSON, as far as the autoscaler needs them, and converts Kubernetes times. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from pdmesh.autoscaler.platform import PlatformError

MANAGER = "pdmesh-autoscaler"
"""The manager name of our own changes in managedFields."""
_MAX_NAME = 100


@dataclass(frozen=True)
class Owner:
    """Hold the owner that last set the replicas, and when (in words), as far as the API knows. Older servers (such as 1.20) do
    not record changes through the scale subresource, and still name the owner before it. Empty: no owner is named."""

    manager: str = ""
    time: str = ""


NO_OWNER = Owner()


@dataclass(frozen=True)
class Seen:
    """Describe a Deployment; `uid` differs once it was deleted and recreated."""

    name: str
    uid: str
    version: str
    replicas: int
    annotations: dict[str, str]
    owner: Owner = NO_OWNER


def seen_of(deployment: dict[str, object]) -> Seen:
    """Return the Deployment of an API object. Raises PlatformError for anything else."""
    match deployment:
        case {"metadata": {"name": str(name), "uid": str(uid), "resourceVersion": str(version), **metadata}, "spec": dict(spec)}:
            annotations = metadata.get("annotations") or {}
            replicas = spec.get("replicas", 1)
            if isinstance(annotations, dict) and isinstance(replicas, int):
                return Seen(name, uid, version, replicas, annotations, _owner(metadata.get("managedFields")))
    raise PlatformError(f"the API server sent a Deployment that is not one: {str(deployment)[:200]}")


def _owner(managed: object) -> Owner:
    """Return the latest owner of spec.replicas: server-side apply allows several."""
    owners = []
    for each in managed if isinstance(managed, list) else []:
        match each:
            case {"manager": str(manager), "fieldsV1": {"f:spec": {"f:replicas": _}}}:
                owners.append(Owner(manager[:_MAX_NAME], str(each.get("time", ""))[:_MAX_NAME]))
    return max(owners, key=lambda owner: owner.time, default=NO_OWNER)


# Times as Kubernetes writes them (RFC 3339); seconds since 1970, UTC.


def micro_time(wall_s: float) -> str:
    """Format a MicroTime: always six digits, which its parser requires."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def time(wall_s: float) -> str:
    """Format a Time: whole seconds."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(text: str) -> float:
    """Return the seconds since 1970. Raises ValueError for an invalid time, or one without a time zone."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write it like 2026-01-31T12:00:00Z") from None
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; end it with Z for UTC")
    return found.timestamp()
