"""Reads traces of real services: arrival times, lengths, shared prefixes. Finds the sessions in them. Pure but for reading.

Traces are recognized by their content: Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens, GeneratedTokens) and
Mooncake's (JSON lines with timestamp in ms, input_length, output_length and optionally hash_ids, one for each block of 512
prompt tokens; an id stands for its block and all before it).
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

BLOCK_TOKENS = 512
_CSV_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """Raised for a trace file that cannot be used: file, line, field and the problem."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Hold one request: seconds since the first one, lengths in tokens, ids of its prompt's blocks (may be none), each of
    `block_tokens` tokens. `after`: the row whose next turn this is; None: it starts a session, or sessions are not known."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: float = BLOCK_TOKENS
    after: int | None = None

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """Return the ids of the blocks that the prompt fills."""
        return self.blocks[: int(self.input_tokens // self.block_tokens)]

    def edge(self, number: int) -> int:
        """Return where block `number` begins: scaled blocks differ by a token, but equal places are equal in all prompts."""
        return int(number * self.block_tokens)


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
    return tuple(replace(row, at_s=row.at_s - start) for row in rows)


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


# The sessions of a trace.


_MIN_FULL_BLOCKS = 2
"""A former turn has filled so many blocks: the first one alone is often a system prompt that most requests begin with."""


def link_sessions(rows: Sequence[TraceRow]) -> tuple[TraceRow, ...]:
    """Return the rows, each with the row whose next turn it is: of the earlier ones with a shorter prompt, whose full blocks it
    begins with, the one with the most such blocks, and of those the latest. Must be given whole rows, before `scaled`. Raises
    TraceError if the rows have no blocks."""
    if not any(row.blocks for row in rows):
        raise TraceError("the trace has no hash_ids, so nothing says which of its requests continue others")
    latest: dict[tuple[int, ...], int] = {}
    linked = []
    for number, row in enumerate(rows):
        linked.append(replace(row, after=_former(rows, row, latest)))
        full = row.full_blocks
        if len(full) >= _MIN_FULL_BLOCKS:
            latest[len(full), full[-1]] = number
    return tuple(linked)


def _former(rows: Sequence[TraceRow], row: TraceRow, latest: Mapping[tuple[int, ...], int]) -> int | None:
    for num_blocks in range(len(row.blocks), _MIN_FULL_BLOCKS - 1, -1):
        number = latest.get((num_blocks, row.blocks[num_blocks - 1]))
        if number is None or rows[number].input_tokens >= row.input_tokens:
            continue
        if rows[number].full_blocks == row.blocks[:num_blocks]:
            return number
    return None


def sessions_of(rows: Sequence[TraceRow]) -> list[list[int]]:
    """Return the rows of each session, by number and time, the sessions by their first row. Rows that follow none start one."""
    sessions: list[list[int]] = []
    session_of: list[list[int]] = []
    for number, row in enumerate(rows):
        if row.after is None:
            sessions.append([])
        session = sessions[-1] if row.after is None else session_of[row.after]
        session.append(number)
        session_of.append(session)
    return sessions


def some_sessions(rows: Sequence[TraceRow], share: float) -> tuple[TraceRow, ...]:
    """Return about `share` of the sessions, whole. The same ones each time, and all of them among those of a larger share."""
    chosen = [session for session in sessions_of(rows) if random.Random(session[0]).random() < share]
    kept = sorted(number for session in chosen for number in session)
    places: dict[int | None, int] = {number: place for place, number in enumerate(kept)}
    return tuple(replace(rows[number], after=places.get(rows[number].after)) for number in kept)


def scaled(rows: Iterable[TraceRow], factor: float) -> tuple[TraceRow, ...]:
    """Return the rows with lengths and blocks divided by `factor`, from 1 to BLOCK_TOKENS: what prompts share is divided, too.
    Raises ValueError for another factor."""
    if not 1 <= factor <= BLOCK_TOKENS:
        raise ValueError(f"the factor of a trace's lengths must be from 1 to {BLOCK_TOKENS}, not {factor:g}")
    return tuple(
        replace(
            row,
            input_tokens=max(1, int(row.input_tokens / factor)),
            output_tokens=max(1, int(row.output_tokens / factor)),
            block_tokens=row.block_tokens / factor,
        )
        for row in rows
    )
