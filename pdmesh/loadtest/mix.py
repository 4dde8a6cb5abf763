"""Classes of traffic from a TOML file, one table for each:

[chat]
share = 3                 # relative to the others'; 1 when absent
priority = "interactive"  # standard when absent
tenant = "a"
input_tokens = "lognormal:300:0.8"
output_tokens = 128       # a number, or a distribution as in the flags
ttft_ms = 300             # objectives of its own; those that are absent are the common ones
tpot_ms = 40
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from pdmesh.client.types import Priority
from pdmesh.loadtest.lengths import Distribution, parse
from pdmesh.loadtest.objectives import Objectives
from pdmesh.loadtest.workload import TrafficClass

_LENGTHS = ("input_tokens", "output_tokens")
_BOUNDS = ("ttft_ms", "tpot_ms", "e2e_ms")
_KNOWN = ("share", "priority", "tenant", *_LENGTHS, *_BOUNDS)


def read_mix(path: str) -> tuple[tuple[TrafficClass, ...], dict[str, Objectives]]:
    """The classes, and the objectives of those that name some. Raises ValueError: file, class and field."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        if not tables:
            raise ValueError("holds no class of traffic")
        classes = tuple(_traffic(name, table) for name, table in tables.items())
        return classes, {name: _objectives(name, table) for name, table in tables.items() if set(table) & set(_BOUNDS)}
    except (OSError, ValueError) as error:
        raise ValueError(f"mix: {path}: {error}") from error


def _traffic(name: str, table: object) -> TrafficClass:
    if not isinstance(table, dict):
        raise ValueError(f"{name}: must be a table")
    unknown = sorted(set(table) - set(_KNOWN))
    if unknown:
        raise ValueError(f"{name}: unknown field {unknown[0]!r}; known are {', '.join(_KNOWN)}")
    priority = table.get("priority", "standard")
    known = [member.value for member in Priority]
    if priority not in known:
        raise ValueError(f"{name}.priority: must be one of {', '.join(known)}, not {priority!r}")
    tenant = table.get("tenant", "")
    if not isinstance(tenant, str):
        raise ValueError(f"{name}.tenant: must be text, not {tenant!r}")
    given = {field: _distribution(name, field, table[field]) for field in _LENGTHS if field in table}
    share = _positive(name, table, "share") if "share" in table else 1.0
    return TrafficClass(name=name, share=share, priority=priority, tenant=tenant, **given)


def _objectives(name: str, table: Mapping[str, object]) -> Objectives:
    return Objectives(**{field: _positive(name, table, field) for field in _BOUNDS if field in table})


def _distribution(name: str, field: str, value: object) -> Distribution:
    try:
        return parse(str(value))
    except ValueError as error:
        raise ValueError(f"{name}.{field}: {error}") from None


def _positive(name: str, table: Mapping[str, object], field: str) -> float:
    value = table[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}.{field}: must be a number above 0, not {value!r}")
    return float(value)
