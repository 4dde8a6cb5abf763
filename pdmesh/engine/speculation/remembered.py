"""Cost curves of earlier starts, in the user's cache folder: one file for each model, machine and setting.

A curve is measured in seconds; whether one still holds is seen in a few steps (`calibrate.confirmed`). So workers of a machine
measure once, not at each start, and what was measured while others had the machine lasts until the next start at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pdmesh.engine.loader.hash import cache_folder
from pdmesh.engine.speculation.cost_curve import CostCurve

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Circumstances:
    """What a step's time depends on. `max_rows`: no step will have more, `max_context`: no sequence."""

    weights_hash: str
    numeric_mode: str
    processor: str
    num_threads: int
    kv_dtype: str
    block_size: int
    max_context: int
    max_rows: int


def recall(of: Circumstances) -> CostCurve | None:
    """The curve that was remembered last; None without any, and for any other content, garbage included."""
    try:
        content = json.loads(_path(of).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("of") != asdict(of):
        return None
    return _curve(content.get("rows"), content.get("seconds"), (content.get("context_s"), content.get("row_context_s")))


def remember(of: Circumstances, curve: CostCurve) -> None:
    """Written beside and renamed, so that a reader never sees half. A folder that cannot be written costs the next start a
    measurement, no more."""
    attention = {"context_s": curve.context_s, "row_context_s": curve.row_context_s}
    with contextlib.suppress(OSError):
        path = _path(of)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".curve-")
        with os.fdopen(handle, "w") as file:
            json.dump({"of": asdict(of), "rows": curve.rows, "seconds": curve.seconds, **attention}, file)
        os.replace(name, path)


def processor_name(device: torch.device) -> str:
    """Of what computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _path(of: Circumstances) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(of), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "curves" / f"{digest[:32]}.json"


def _curve(rows: object, seconds: object, attention: Sequence[object]) -> CostCurve | None:
    if not (isinstance(rows, list) and isinstance(seconds, list) and rows and len(rows) == len(seconds)):
        return None
    if not all(type(row) is int for row in rows) or rows != sorted(set(rows)) or rows[0] != 1:
        return None
    times = [number for number in (*seconds, *attention) if isinstance(number, float) and 0 < number < math.inf]
    if len(times) != len(rows) + len(attention) or seconds != sorted(seconds):
        return None
    context_s, row_context_s = times[-2:]
    return CostCurve(tuple(rows), tuple(seconds), context_s, row_context_s)
