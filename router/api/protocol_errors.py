"""Helpers that the protocols other than pdmesh's own share: errors that name a field of the caller's message, ids, rounded
numbers."""

import re
import struct
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from pdmesh.runtime.errors import MeshError

_ODD = re.compile(r"[^A-Za-z0-9_-]+")


def mesh_request_id(foreign: str) -> str:
    """Return the caller's id, which may hold any characters, as an id for our logs and traces; empty if it is empty."""
    return _ODD.sub("-", foreign)[:64]


def renamed(error: MeshError, names: Mapping[str, str]) -> MeshError:
    """Return `error` with the caller's name for the field at fault.

    `names` maps our fields to the caller's; a path below a field ("messages[3].role", "sampling.stop[2]") is kept. An error
    without a field, or about a field without a name there, is returned unchanged.
    """
    theirs = their_name(error.field or "", names)
    if theirs is None:
        return error
    problem = error.message.removeprefix(f"{error.field}: ")
    return MeshError(
        f"{theirs}: {problem}", code=error.code, field=theirs, retry_delay_s=error.retry_delay_s, reason=error.reason
    )


def their_name(field: str, names: Mapping[str, str]) -> str | None:
    """Return the caller's name for our field, by the longest prefix that is in `names`; None without one."""
    for end in range(len(field), 0, -1):
        if (end == len(field) or field[end] in ".[") and field[:end] in names:
            return names[field[:end]] + field[end:]
    return None


def package_version() -> str:
    """Return the version of pdmesh; empty where the code runs without having been installed."""
    try:
        return version("pdmesh")
    except PackageNotFoundError:
        return ""


def shortest(value: float) -> float:
    """Return the shortest decimal that rounds to the same 32-bit float: 0.7 arrives as 0.699999988, and has to draw the same
    tokens through every protocol."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if _as_float32(candidate) == value:
            return candidate
    return value


def _as_float32(value: float) -> float | None:
    """Return `value` rounded to 32 bits; None where that would be infinite."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return None
    return float(rounded)
