"""The speed and size of a modelled worker. Read from a JSON file such as

    {"fixed_s": 4e-3, "per_prefill_token_s": 5e-5, "per_prefill_context_s": 2e-9, "per_sequence_s": 1e-4,
     "per_context_token_s": 1e-8, "max_num_batched_tokens": 2048, "max_num_seqs": 256, "num_blocks": 30000, "block_size": 16,
     "max_context": 32768, "kv_bytes_per_token": 131072}

The first five are those of `pdmesh/planning/latency_model.py`; the rest has defaults. With `"tokens_per_row": 1.5,
"computed_per_row": 2` it drafts tokens where that pays (`pdmesh status` shows what workers report).
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdmesh.planning.latency_model import MAX_PER_ROW, Drafts, LatencyModel

PRICES = ("fixed_s", "per_prefill_token_s", "per_prefill_context_s", "per_sequence_s", "per_context_token_s")
HABITS = ("between_s", "noise", "noise_lasts_s")
"""Fields that come from a step log, not from workers' reports."""
DRAFTED = ("tokens_per_row", "computed_per_row")
"""What speculation makes of a sequence's part of a step, as workers report it; at least 1."""
_NOT_SECONDS = ("noise", "tokens_per_row", "computed_per_row")
KNOWN_STEPS = 1_000_000
"""Steps that a modelled worker claims to be fitted to: its speed counts as measured."""


class SpecError(ValueError):
    """Raised when a file does not describe a worker: file, field, the problem."""


@dataclass(frozen=True)
class WorkerSpec:
    """Describe a worker. `speed` is what steps take, and what the worker reports. Sizes are those of the engine's flags;
    `keeps_pace`: steps hold only so much of prompts as rows with a TPOT objective can spare. `prefix_tokens` of a hash of the
    arrivals, 0: no prefix cache. `between_s` pass between one step and the next, outside any step's time. `noise`: how much
    single steps vary, as the standard deviation of the logarithm; disturbances last `noise_lasts_s`
    (pdmesh/simulator/workers/batch.py). `host`: routers apply what they learn of one worker to the others on its host; empty:
    each has a machine of its own. `tokens_per_row`, `computed_per_row`: what speculation makes of a row where it pays
    (`Drafts`)."""

    speed: LatencyModel
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    num_blocks: int = 8192
    block_size: int = 16
    max_context: int = 32768
    kv_bytes_per_token: int = 131072
    keeps_pace: bool = True
    prefix_tokens: int = 512
    between_s: float = 0.0
    noise: float = 0.0
    noise_lasts_s: float = 0.2
    host: str = ""
    tokens_per_row: float = 1.0
    computed_per_row: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "num_blocks", "block_size", "max_context"):
            _require(getattr(self, name) >= 1, name, "must be at least 1")
        for name in PRICES:
            price = getattr(self.speed, name)
            _require(0 <= price < math.inf, name, "must be seconds, not below 0")
        _require(self.speed.decode_s(1, 1) > 0, "fixed_s", "a step that takes no time has no order")
        for name in ("between_s", "noise"):
            _require(0 <= getattr(self, name) < math.inf, name, "must not be negative")
        _require(1 <= self.tokens_per_row <= MAX_PER_ROW, "tokens_per_row", f"must be from 1 to {MAX_PER_ROW:g}")
        _require(self.tokens_per_row <= self.computed_per_row, "computed_per_row", "must be at least tokens_per_row")
        _require(self.computed_per_row <= MAX_PER_ROW, "computed_per_row", f"must be at most {MAX_PER_ROW:g}")
        _require(0 < self.noise_lasts_s < math.inf, "noise_lasts_s", "must be seconds, more than 0")
        _require(self.kv_bytes_per_token >= 0, "kv_bytes_per_token", "must not be negative")
        _require(self.max_num_seqs < self.max_num_batched_tokens, "max_num_seqs", "must be below max_num_batched_tokens")
        _require(self.prefix_tokens >= 0, "prefix_tokens", "must not be negative")
        _require(self.prefix_tokens % self.block_size == 0, "prefix_tokens", "must be a multiple of block_size")

    @property
    def drafts(self) -> Drafts:
        """Return what speculation does where it pays."""
        return Drafts(self.tokens_per_row, self.computed_per_row)

    @property
    def largest(self) -> int:
        """Return the tokens of the longest sequence it could ever hold."""
        return min(self.max_context, self.num_blocks * self.block_size)


def read_spec(path: str) -> WorkerSpec:
    """Return the worker that the JSON file at `path` describes. Raises SpecError."""
    try:
        return spec_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: {error}") from error


def spec_of(table: object) -> WorkerSpec:
    """Return the worker from the file's content. Raises ValueError naming the field."""
    if not isinstance(table, dict):
        raise ValueError("holds no table of numbers; see pdmesh/simulator/workers/spec.py for an example")
    sizes = {field.name for field in dataclasses.fields(WorkerSpec)} - {"speed", "host", *HABITS, *DRAFTED}
    unknown = sorted(set(table) - sizes - {*PRICES, *HABITS, *DRAFTED})
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown field; known are {', '.join([*PRICES, *HABITS, *DRAFTED, *sorted(sizes)])}")
    missing = [name for name in PRICES if name not in table]
    if missing:
        raise ValueError(f"{missing[0]}: is missing; give seconds")
    fixed_s, token_s, context_s, row_s, row_context_s = (_number(table, name) for name in PRICES)
    speed = LatencyModel(fixed_s, token_s, context_s, row_s, row_context_s, num_steps=KNOWN_STEPS)
    given: dict[str, Any] = {name: _size(table, name) for name in sizes & set(table)}
    given |= {name: _number(table, name) for name in HABITS + DRAFTED if name in table}
    return WorkerSpec(speed, **given)


def _number(table: Mapping[str, object], name: str) -> float:
    value = table[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}: {value!r} is not a number{'' if name in _NOT_SECONDS else ' of seconds'}")
    return float(value)


def _size(table: Mapping[str, object], name: str) -> int:
    value = table[name]
    if isinstance(value, bool) != (name == "keeps_pace") or not isinstance(value, int):
        raise ValueError(f"{name}: {value!r} is not {'true or false' if name == 'keeps_pace' else 'a whole number'}")
    return value


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {what}")
