"""Trace files of real services: when requests came, how long they were, what they had in common.

Read by their content: Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake's (JSON
lines with timestamp in ms, input_length, output_length and optionally hash_ids, one for each block of 512 prompt tokens).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

BLOCK_TOKENS = 512
_CSV_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace file cannot be used: file, line, field and what is wrong."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: seconds since the first one, lengths in tokens, ids of its prompt's blocks of BLOCK_TOKENS (may be none)."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: str) -> tuple[TraceRow, ...]:
    """The rows of a trace file by time, the first at 0 s. Raises TraceError."""
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
    """A number of tokens, at least 1: a logged 0 (an answer that was empty) becomes 1, the least that can be asked for."""
    value = row.get(name)
    try:
        number = -1.0 if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = -1.0
    # Some writers make floats of whole numbers.
    if not number >= 0 or not number.is_integer():
        raise ValueError(f"{where}: {name}: must be a number of tokens, not {value!r}")
    return max(1, int(number))
