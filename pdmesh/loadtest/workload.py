"""Plans the workload: a seed and a description in, planned sessions out. Pure.

A session is one request, or a conversation: each further turn is due when the answer to the previous one is complete and its
think time is over. Prompts are segments, named pieces of a number of tokens: the same name is the same tokens, which is how
prompts share a prefix. Arrivals and contents have separate random numbers: other lengths do not move the arrivals.
"""

from __future__ import annotations

import csv
import json
import math
import random
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from pdmesh.client.types import Priority
from pdmesh.loadtest import arrivals
from pdmesh.loadtest.arrivals import Distribution, fixed, parse
from pdmesh.loadtest.record import Objectives

# Trace files of real services: arrival times, lengths, shared prefixes.
#
# They are recognized by their content: Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens, GeneratedTokens) and
# Mooncake's (JSON lines with timestamp in ms, input_length, output_length and optionally hash_ids, one for each block of 512
# prompt tokens).


BLOCK_TOKENS = 512
_CSV_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """Raised for a trace file that cannot be used: file, line, field and the problem."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Hold one request: seconds since the first one, lengths in tokens, ids of its prompt's blocks of BLOCK_TOKENS (may be
    none)."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: str) -> tuple[TraceRow, ...]:
    """Return the rows of a trace file by time, the first at 0 s. Raises TraceError."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            rows = list(_json_rows(lines) if first.lstrip().startswith("{") else _csv_rows(lines))
    except (OSError, ValueError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: holds no request")
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    return tuple(TraceRow(row.at_s - start, row.input_tokens, row.output_tokens, row.blocks) for row in rows)


def _csv_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    missing = [name for name in _CSV_FIELDS if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"is neither a CSV with {', '.join(_CSV_FIELDS)} nor lines of JSON: {missing[0]} is missing")
    for row in reader:
        where = f"line {reader.line_num}"
        stamp = row["TIMESTAMP"] or ""
        try:
            # Some stamps have seven decimals; datetime reads six.
            at_s = datetime.fromisoformat(stamp[:26]).timestamp()
        except ValueError:
            raise ValueError(f"{where}: TIMESTAMP: {stamp!r} is no time") from None
        yield TraceRow(at_s, _count(row, "ContextTokens", where), _count(row, "GeneratedTokens", where))


def _json_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: is no JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: is no JSON object")
        at_ms = row.get("timestamp")
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < math.inf:
            raise ValueError(f"{where}: timestamp: must be milliseconds, not {at_ms!r}")
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
            raise ValueError(f"{where}: hash_ids: must be a list of whole numbers")
        yield TraceRow(at_ms / 1e3, _count(row, "input_length", where), _count(row, "output_length", where), tuple(blocks))


def _count(row: Mapping[str, object], name: str, where: str) -> int:
    """Return a number of tokens, at least 1: a logged 0 (an answer that was empty) becomes 1, the least that can be requested."""
    value = row.get(name)
    try:
        number = -1.0 if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = -1.0
    # Some writers make floats of whole numbers.
    if not number >= 0 or not number.is_integer():
        raise ValueError(f"{where}: {name}: must be a number of tokens, not {value!r}")
    return max(1, int(number))


@dataclass(frozen=True, slots=True)
class Segment:
    """Name a piece of a prompt. Equal keys are equal tokens, up to the shorter length."""

    key: str
    num_tokens: int


@dataclass(frozen=True)
class TrafficClass:
    """Describe a kind of request: its share of all (relative to the others'), its lengths, its tenant and priority."""

    name: str = "standard"
    share: float = 1.0
    priority: str = "standard"
    tenant: str = ""
    input_tokens: Distribution = field(default=fixed(128))
    output_tokens: Distribution = field(default=fixed(64))


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Plan one request. `think_s` after the answer before it; `cancel_after_s` after it was due, None: it runs to its end."""

    think_s: float
    segments: tuple[Segment, ...]
    output_tokens: int
    cancel_after_s: float | None = None

    @property
    def num_new_tokens(self) -> int:
        """Return what this turn adds to a conversation, its answer included."""
        return sum(segment.num_tokens for segment in self.segments) + self.output_tokens


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """Plan a conversation (mostly of one turn) that starts `at_s` seconds after the run."""

    index: int
    at_s: float
    traffic: TrafficClass
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True)
class Limits:
    """Hold the limits of the target: None is no limit. Longer prompts and outputs are cut to fit."""

    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_context: int | None = None

    def lengths(self, input_tokens: int, output_tokens: int) -> tuple[int, int]:
        """Return both lengths, cut if needed; at least 1."""
        output_tokens = min(output_tokens, self.max_output_tokens or output_tokens)
        if self.max_context is not None:
            output_tokens = max(1, min(output_tokens, self.max_context - 1))
            input_tokens = max(1, min(input_tokens, self.max_context - output_tokens))
        return min(input_tokens, self.max_input_tokens or input_tokens), output_tokens


def num_cut(rows: Sequence[TraceRow], limits: Limits) -> int:
    """Return how many rows of a trace are longer than the limits."""
    return sum(limits.lengths(row.input_tokens, row.output_tokens) != (row.input_tokens, row.output_tokens) for row in rows)


@dataclass(frozen=True)
class Arrivals:
    """Describe when sessions start. `kind`: poisson, gamma, constant or ramp; rates in sessions per second."""

    kind: str = "poisson"
    rate: float = 1.0
    burstiness: float = 1.0
    ramp_to: float = 1.0

    def times(self, duration_s: float, rng: random.Random) -> Iterator[float]:
        """Yield the arrivals of `duration_s` seconds."""
        kinds = {
            "poisson": lambda: arrivals.poisson(self.rate, rng),
            "gamma": lambda: arrivals.gamma(self.rate, self.burstiness, rng),
            "constant": lambda: arrivals.constant(self.rate),
            "ramp": lambda: arrivals.ramp(self.rate, self.ramp_to, duration_s, rng),
        }
        return takewhile(lambda at_s: at_s < duration_s, kinds[self.kind]())


@dataclass(frozen=True)
class Workload:
    """Hold everything that determines a plan, except its seed and length. With a `trace` to replay, `arrivals` and
    `prefix_tokens` do not count; with `length_rows`, the classes' lengths do not: pairs of lengths are drawn from the rows
    instead."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    classes: tuple[TrafficClass, ...] = (TrafficClass(),)
    trace: tuple[TraceRow, ...] = ()
    trace_speed: float = 1.0
    length_rows: tuple[TraceRow, ...] = ()
    prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: Distribution = field(default=fixed(1))
    think_s: Distribution = field(default=fixed(0))
    cancel_share: float = 0.0
    cancel_after_s: Distribution = field(default=Distribution("exponential", (1,)))
    limits: Limits = field(default_factory=Limits)


def plan(workload: Workload, seed: int, duration_s: float) -> Iterator[PlannedSession]:
    """Yield the sessions that start within `duration_s` seconds, by time. The same arguments give the same sessions."""
    rng = random.Random(f"{seed}/contents")
    planner = _Planner(workload, rng)
    if workload.trace:
        times: Iterable[float] = arrivals.replay((row.at_s for row in workload.trace), workload.trace_speed)
        rows: Iterable[TraceRow | None] = workload.trace
    else:
        times = workload.arrivals.times(duration_s, random.Random(f"{seed}/arrivals"))
        rows = iter(lambda: rng.choice(workload.length_rows) if workload.length_rows else None, object())
    for index, (at_s, row) in enumerate(zip(times, rows, strict=False)):
        if at_s >= duration_s:
            return
        yield planner.session(index, at_s, row)


class _Planner:
    """Draw the sessions of one plan, one after the other."""

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        self._workload = workload
        self._rng = rng
        self._shares = [traffic.share for traffic in workload.classes]

    def session(self, index: int, at_s: float, row: TraceRow | None) -> PlannedSession:
        workload, rng = self._workload, self._rng
        traffic = rng.choices(workload.classes, self._shares)[0]
        num_turns = 1 if workload.trace else workload.turns.draw_count(rng)
        turns = [self._turn(f"{index}.{number}", traffic, row, first=number == 0) for number in range(num_turns)]
        return PlannedSession(index, at_s, traffic, self._within_context(turns))

    def _turn(self, name: str, traffic: TrafficClass, row: TraceRow | None, *, first: bool) -> PlannedTurn:
        workload, rng = self._workload, self._rng
        if row is None:
            lengths = traffic.input_tokens.draw_count(rng), traffic.output_tokens.draw_count(rng)
        else:
            lengths = row.input_tokens, row.output_tokens
        num_input, num_output = workload.limits.lengths(*lengths)
        if workload.trace and row is not None and row.blocks:
            segments = _block_segments(row.blocks, num_input, name)
        else:
            segments = self._segments(name, num_input, first=first)
        think_s = 0.0 if first else workload.think_s.draw(rng)
        return PlannedTurn(think_s, segments, num_output, self._cancellation())

    def _segments(self, name: str, num_tokens: int, *, first: bool) -> tuple[Segment, ...]:
        """Return a shared prefix before at least one token of its own; later turns have their conversation as prefix."""
        num_shared = min(self._workload.prefix_tokens, num_tokens - 1) if first else 0
        if num_shared <= 0:
            return (Segment(name, num_tokens),)
        shared = Segment(f"prefix{self._rng.randrange(self._workload.num_prefixes)}", num_shared)
        return shared, Segment(name, num_tokens - num_shared)

    def _cancellation(self) -> float | None:
        if self._rng.random() >= self._workload.cancel_share:
            return None
        return self._workload.cancel_after_s.draw(self._rng)

    def _within_context(self, turns: Sequence[PlannedTurn]) -> tuple[PlannedTurn, ...]:
        """Return as many turns as the model's context holds, the first in any case."""
        max_context = self._workload.limits.max_context
        kept, used = list(turns[:1]), turns[0].num_new_tokens
        for turn in turns[1:]:
            used += turn.num_new_tokens
            if max_context is not None and used > max_context:
                break
            kept.append(turn)
        return tuple(kept)


def _block_segments(blocks: Sequence[int], num_tokens: int, name: str) -> tuple[Segment, ...]:
    """Return a segment for each block of the trace; what follows the last of them belongs to this request alone."""
    segments = []
    for block in blocks:
        if num_tokens <= 0:
            break
        segments.append(Segment(f"block{block}", min(BLOCK_TOKENS, num_tokens)))
        num_tokens -= BLOCK_TOKENS
    return (*segments, *([Segment(name, num_tokens)] if num_tokens > 0 else ()))


# Classes of traffic from a TOML file, one table for each:
#
# [chat]
# share = 3                 # relative to the others'; 1 when absent
# priority = "interactive"  # standard when absent
# tenant = "a"
# input_tokens = "lognormal:300:0.8"
# output_tokens = 128       # a number, or a distribution as in the flags
# ttft_ms = 300             # objectives of its own; those that are absent are the common ones
# tpot_ms = 40


_LENGTHS = ("input_tokens", "output_tokens")
_BOUNDS = ("ttft_ms", "tpot_ms", "e2e_ms")
_KNOWN = ("share", "priority", "tenant", *_LENGTHS, *_BOUNDS)


def read_mix(path: str) -> tuple[tuple[TrafficClass, ...], dict[str, Objectives]]:
    """Return the classes, and the objectives of those that name some. Raises ValueError: file, class and field."""
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
