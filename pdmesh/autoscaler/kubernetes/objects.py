"""A Deployment as the API shows it, as far as the autoscaler looks at it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from pdmesh.autoscaler.platform import PlatformError

MANAGER = "pdmesh-autoscaler"
"""As whom our own changes are noted in managedFields."""
_MAX_NAME = 100


@dataclass(frozen=True)
class Owner:
    """Who set the replicas last, and when (in words), as far as the API knows: older servers (1.20 is one) do not note what comes
    by the scale subresource, and go on naming whoever set them before. Empty: it names nobody."""

    manager: str = ""
    time: str = ""


NOBODY = Owner()


@dataclass(frozen=True)
class Seen:
    """`uid` differs once it was deleted and made anew."""

    name: str
    uid: str
    version: str
    replicas: int
    annotations: dict[str, str]
    owner: Owner = NOBODY


def seen_of(deployment: dict[str, object]) -> Seen:
    """A Deployment of the API. Raises PlatformError for anything else."""
    match deployment:
        case {"metadata": {"name": str(name), "uid": str(uid), "resourceVersion": str(version), **metadata}, "spec": dict(spec)}:
            annotations = metadata.get("annotations") or {}
            replicas = spec.get("replicas", 1)
            if isinstance(annotations, dict) and isinstance(replicas, int):
                return Seen(name, uid, version, replicas, annotations, _owner(metadata.get("managedFields")))
    raise PlatformError(f"what the API server calls a Deployment is none: {str(deployment)[:200]}")


def _owner(managed: object) -> Owner:
    """The latest of those that own spec.replicas, of which there may be several by server-side apply."""
    owners = []
    for each in managed if isinstance(managed, list) else []:
        match each:
            case {"manager": str(manager), "fieldsV1": {"f:spec": {"f:replicas": _}}}:
                owners.append(Owner(manager[:_MAX_NAME], str(each.get("time", ""))[:_MAX_NAME]))
    return max(owners, key=lambda owner: owner.time, default=NOBODY)


# Times as Kubernetes writes them (RFC 3339). Pure; seconds since 1970, UTC.


def micro_time(wall_s: float) -> str:
    """As a MicroTime: always six digits, which its parser insists on."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def time(wall_s: float) -> str:
    """As a Time: whole seconds."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(text: str) -> float:
    """Raises ValueError for what is no time, or one without its zone."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{text!r} is no time; write it like 2026-01-31T12:00:00Z") from None
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; end it with Z for UTC")
    return found.timestamp()
