"""The objectives file: TTFT and TPOT objectives of each model, and of each priority where they differ.

TOML or JSON (by the file's ending), one table per model; within it, one per priority whose bounds differ:

    [smollm2]
    ttft_ms = 500
    tpot_ms = 40
    quantile = 0.99     # share of requests that must meet both; 0.99 when absent

    [smollm2.interactive]
    ttft_ms = 300       # tpot_ms as above

The model's own bounds hold for interactive and standard requests. Batch has no objectives unless `[MODEL.batch]` sets them.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.runtime.config import ConfigError
from pdmesh.v1 import common_pb2

DEFAULT_QUANTILE = 0.99
PRIORITIES: Mapping[str, int] = {
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
    "standard": common_pb2.PRIORITY_STANDARD,
    "batch": common_pb2.PRIORITY_BATCH,
}
_BOUNDS = ("ttft_ms", "tpot_ms")


@dataclass(frozen=True)
class Bounds:
    """Hold upper bounds in milliseconds; None: no bound."""

    ttft_ms: int | None
    tpot_ms: int | None


@dataclass(frozen=True)
class ModelObjective:
    """Hold upper bounds in milliseconds and the share of requests, in (0, 1), that must meet them; `overrides` by priority."""

    model: str
    ttft_ms: int
    tpot_ms: int
    quantile: float
    overrides: Mapping[int, Bounds] = field(default_factory=dict)

    def bounds(self, priority: int) -> Bounds:
        """Return the bounds for a request of this priority (common.proto)."""
        if priority in self.overrides:
            return self.overrides[priority]
        if priority == common_pb2.PRIORITY_BATCH:
            return Bounds(None, None)
        return Bounds(self.ttft_ms, self.tpot_ms)


def load(path: str) -> tuple[ModelObjective, ...]:
    """Return the objectives in the file at `path`; none for an empty path. Raises ConfigError naming file, model and field."""
    if not path:
        return ()
    try:
        tables = _read(Path(path))
        return tuple(_parse(model, table) for model, table in tables.items())
    except (OSError, ValueError) as error:
        raise ConfigError("--objectives", f"{path}: {error}") from error


def _read(path: Path) -> Mapping[str, object]:
    text = path.read_text(encoding="utf-8")
    tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    if not isinstance(tables, dict):
        raise ValueError("holds no table of models")
    return tables


def _parse(model: str, table: object) -> ModelObjective:
    if not isinstance(table, dict):
        raise ValueError(f"{model}: must be a table with ttft_ms and tpot_ms")
    _check_names(model, table, (*_BOUNDS, "quantile", *PRIORITIES))
    ttft_ms, tpot_ms = (_milliseconds(model, table, name) for name in _BOUNDS)
    overrides = {
        priority: _override(f"{model}.{name}", table[name], name, Bounds(ttft_ms, tpot_ms))
        for name, priority in PRIORITIES.items()
        if name in table
    }
    return ModelObjective(model, ttft_ms, tpot_ms, _quantile(model, table), overrides)


def _override(path: str, table: object, name: str, model_bounds: Bounds) -> Bounds:
    """Return a priority's bounds; a missing one is the model's; for batch, none."""
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{path}: must be a table with ttft_ms, tpot_ms or both")
    _check_names(path, table, _BOUNDS)
    rest = Bounds(None, None) if name == "batch" else model_bounds
    ttft_ms, tpot_ms = (_milliseconds(path, table, bound) if bound in table else getattr(rest, bound) for bound in _BOUNDS)
    return Bounds(ttft_ms, tpot_ms)


def _check_names(path: str, table: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ValueError(f"{path}: unknown field {unknown[0]!r}; known are {', '.join(known)}")


def _milliseconds(model: str, table: Mapping[str, object], name: str) -> int:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**32:
        raise ValueError(f"{model}.{name}: must be a whole number of milliseconds, at least 1, not {value!r}")
    return value


def _quantile(model: str, table: Mapping[str, object]) -> float:
    value = table.get("quantile", DEFAULT_QUANTILE)
    if isinstance(value, bool) or not isinstance(value, float) or not 0 < value < 1:
        raise ValueError(f"{model}.quantile: must be a number between 0 and 1, both excluded, not {value!r}")
    return value
