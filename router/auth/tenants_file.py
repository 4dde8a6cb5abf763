"""The tenants file: what each tenant may take. TOML or JSON (by the file's ending), one table for each:

[default]                   # who has no table of his own; without it: weight 1, no limits
weight = 1.0
[tenants.search]
weight = 4.0
max_inflight = 64
tokens_per_s = 20000        # prompt and output
burst_tokens = 200000       # ten seconds of the rate when absent
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from router.flow_control.tenant_limits import TenantLimits

MAX_TENANTS = 100_000
_KNOWN = tuple(field.name for field in fields(TenantLimits))


class TenantsProblem(ValueError):
    """The file cannot be used; the message names file, tenant and field."""


@dataclass(frozen=True)
class TenantTable:
    """Limits by tenant. Immutable."""

    default: TenantLimits = field(default_factory=TenantLimits)
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    def limits_of(self, tenant: str) -> TenantLimits:
        """Of any name; each that has no table of its own has the default's limits to itself."""
        return self.tenants.get(tenant, self.default)


def read_tenants_file(path: Path) -> TenantTable:
    """Raises OSError, TenantsProblem."""
    try:
        text = path.read_text(encoding="utf-8")
        return parse(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    except RecursionError as error:
        raise TenantsProblem(f"{path}: is nested too deeply") from error
    except ValueError as error:
        raise TenantsProblem(f"{path}: {error}") from error


def parse(content: object) -> TenantTable:
    """Raises ValueError naming tenant and field."""
    content = _table("the file", content)
    unknown = sorted(content.keys() - {"default", "tenants"})
    if unknown:
        raise ValueError(f"{unknown[0][:40]}: unknown; known are default and tenants")
    tables = _table("tenants", content.get("tenants", {}))
    if len(tables) > MAX_TENANTS:
        raise ValueError(f"tenants: there are more than {MAX_TENANTS}")
    limits = {name: _limits(f"tenants.{name}", table) for name, table in tables.items()}
    return TenantTable(_limits("default", content.get("default", {})), limits)


def _limits(where: str, content: object) -> TenantLimits:
    table = _table(where, content)
    for name, value in table.items():
        if name not in _KNOWN:
            raise ValueError(f"{where}.{name}: unknown; known are {', '.join(_KNOWN)}")
        kinds = (int,) if name == "max_inflight" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{where}.{name}: must be a {'whole ' if kinds == (int,) else ''}number, not {value!r}")
        if not abs(value) < 1e15:
            raise ValueError(f"{where}.{name}: is out of bounds")
    limits = TenantLimits(**table)
    try:
        limits.validate()
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
    return limits


def _table(where: str, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: must be a table")
    return content
