"""What a client says in headers: who it is, how urgent it is, how long it waits. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api import request_metadata
from router.api.openai.request_id import HEADER
from router.api.validation import refuse

REQUEST_ID, TENANT, PRIORITY, MODE, TIMEOUT = HEADER, "X-Tenant", "X-Priority", "X-Prefill-Mode", "X-Request-Timeout-Ms"
MAX_TIMEOUT_MS = 10**9
HEADER_NAMES = {"options.request_id": REQUEST_ID, "options.tenant": TENANT, "options.cache_salt": "cache_salt"}

_PRIORITIES = {
    "": common_pb2.PRIORITY_UNSPECIFIED,
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "standard": common_pb2.PRIORITY_STANDARD,
    "batch": common_pb2.PRIORITY_BATCH,
}
_MODES = {
    "": mesh_pb2.PREFILL_MODE_UNSPECIFIED,
    "local": mesh_pb2.PREFILL_MODE_LOCAL,
    "remote": mesh_pb2.PREFILL_MODE_REMOTE,
}
_DIGITS = re.compile(r"[0-9]{1,10}")


def options_of(headers: Mapping[str, str], request_id: str) -> mesh_pb2.RequestOptions:
    """`request_id`: see request_id.of. Raises InvalidArgument that names the header."""
    said = mesh_pb2.RequestOptions(
        request_id=request_id,
        tenant=headers.get(TENANT, ""),
        priority=_PRIORITIES[_one_of(headers, PRIORITY, _PRIORITIES)],
        mode=_MODES[_one_of(headers, MODE, _MODES)],
    )
    request_metadata.fill(said, headers.items())
    return said


def requested_time_left_s(headers: Mapping[str, str]) -> float | None:
    """How long the client waits from now on; None without a limit. Raises InvalidArgument."""
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= MAX_TIMEOUT_MS:
        refuse(TIMEOUT, f"{text[:40]!r} is not a number of milliseconds from 1 to {MAX_TIMEOUT_MS}")
    return int(text) / 1000


def _one_of(headers: Mapping[str, str], name: str, known: Mapping[str, object]) -> str:
    value = headers.get(name, "").lower()
    if value not in known:
        refuse(name, f"{value[:40]!r} is none of {', '.join(filter(None, known))}")
    return value
