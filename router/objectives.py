"""The objectives file: what TTFT and TPOT each model promises.

TOML or JSON (by the file's ending), one table per model:

    [smollm2]
    ttft_ms = 500
    tpot_ms = 40
    quantile = 0.99     # share of requests that must meet both; 0.99 when absent
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.config import ConfigError

DEFAULT_QUANTILE = 0.99


@dataclass(frozen=True)
class ModelObjective:
    """Upper bounds in milliseconds and the share of requests, in (0, 1), that must meet them."""

    model: str
    ttft_ms: int
    tpot_ms: int
    quantile: float


def load(path: str) -> tuple[ModelObjective, ...]:
    """The objectives in the file at `path`; none for an empty path. Raises ConfigError naming file, model and field."""
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
    unknown = sorted(set(table) - {"ttft_ms", "tpot_ms", "quantile"})
    if unknown:
        raise ValueError(f"{model}: unknown field {unknown[0]!r}; known are ttft_ms, tpot_ms, quantile")
    return ModelObjective(
        model, _milliseconds(model, table, "ttft_ms"), _milliseconds(model, table, "tpot_ms"), _quantile(model, table)
    )


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
