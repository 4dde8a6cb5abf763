"""Options beside the message, in gRPC metadata or HTTP headers: for clients and proxies that cannot set its fields."""

import re
from collections.abc import Iterable

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.validation import refuse

SLO_TTFT, SLO_TPOT = "x-pdmesh-slo-ttft-ms", "x-pdmesh-slo-tpot-ms"
RETRIES = ("grpc-previous-rpc-attempts", "x-stainless-retry-count")
"""What gRPC itself and OpenAI's clients say of how often they have tried before."""

PRIORITY, TENANT = "x-pdmesh-priority", "x-pdmesh-tenant"
MAX_MS = MAX_ATTEMPT = 2**32 - 1

_PRIORITIES = {
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "standard": common_pb2.PRIORITY_STANDARD,
    "batch": common_pb2.PRIORITY_BATCH,
}
_DIGITS = re.compile(r"[0-9]{1,10}")


def fill(options: mesh_pb2.RequestOptions, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Set the fields of `options` that are unset from what `metadata` says. Raises InvalidArgument that names the key, also where
    the field wins."""
    for key, value in metadata:
        name = key.lower()
        if not isinstance(value, str):
            continue
        if name == SLO_TTFT:
            options.slo_ttft_ms = options.slo_ttft_ms or _milliseconds(name, value)
        elif name == SLO_TPOT:
            options.slo_tpot_ms = options.slo_tpot_ms or _milliseconds(name, value)
        elif name == PRIORITY:
            options.priority = options.priority or _priority(value)
        elif name == TENANT:
            options.tenant = options.tenant or value
        elif name in RETRIES:
            options.attempt = options.attempt or _attempt(name, value)


def _milliseconds(name: str, value: str) -> int:
    if not _DIGITS.fullmatch(value) or not 1 <= int(value) <= MAX_MS:
        refuse(name, f"{value[:40]!r} is not a number of milliseconds from 1 to {MAX_MS}")
    return int(value)


def _attempt(name: str, value: str) -> int:
    if not _DIGITS.fullmatch(value) or int(value) > MAX_ATTEMPT:
        refuse(name, f"{value[:40]!r} is not a number of attempts from 0 to {MAX_ATTEMPT}")
    return int(value)


def _priority(value: str) -> common_pb2.Priority.ValueType:
    if value.lower() not in _PRIORITIES:
        refuse(PRIORITY, f"{value[:40]!r} is none of {', '.join(_PRIORITIES)}")
    return _PRIORITIES[value.lower()]
