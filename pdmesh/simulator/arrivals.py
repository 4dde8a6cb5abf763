"""Arrivals: of real services' public traces, read line by line, or drawn at random.

Azure's LLM inference traces are CSV (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's are JSON lines (timestamp in ms,
input_length, output_length and hash_ids, one for each block of 512 prompt tokens).
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from router.flow_control.types import STANDARD

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class TraceError(ValueError):
    """A trace cannot be used: file, line, column, what is wrong and what to do."""


class Arrival(NamedTuple):
    """One request: simulated seconds, lengths in tokens (at least one), names of its prompt's full prefix blocks in order."""

    at_s: float
    num_input: int
    num_output: int
    hashes: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = STANDARD


def read_azure(path: str) -> Iterator[Arrival]:
    """Azure's CSV, the first arrival at 0 s. Raises TraceError."""
    with _opened(path) as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}: line 1: {missing[0]}: no such column; is this a trace of Azure's LLM inference data set?")
        yield from _from_zero(path, _azure_rows(path, reader))


def read_mooncake(path: str) -> Iterator[Arrival]:
    """Mooncake's JSON lines, the first arrival at 0 s. Raises TraceError."""
    with _opened(path) as lines:
        yield from _from_zero(path, _mooncake_rows(path, lines))


READERS: Mapping[str, Callable[[str], Iterator[Arrival]]] = {
    "azure-conv": read_azure,
    "azure-code": read_azure,
    "mooncake": read_mooncake,
}


def poisson(rate: float, lengths: Callable[[random.Random], tuple[int, int]], seed: int) -> Iterator[Arrival]:
    """Endless: independent arrivals, `rate` in a second, each as long as `lengths` draws it (input, output)."""
    rng, at_s = random.Random(seed), 0.0
    while True:
        at_s += rng.expovariate(rate)
        num_input, num_output = lengths(rng)
        yield Arrival(at_s, num_input, num_output)


def log_normal(mean_input: float, mean_output: float, sigma: float) -> Callable[[random.Random], tuple[int, int]]:
    """Lengths with these means; `sigma` 0: all alike, 1: as scattered as people's are, or more."""

    def draw(rng: random.Random) -> tuple[int, int]:
        num_input, num_output = (mean * rng.lognormvariate(-sigma * sigma / 2, sigma) for mean in (mean_input, mean_output))
        return max(1, round(num_input)), max(1, round(num_output))

    return draw


@contextmanager
def _opened(path: str) -> Iterator[Iterable[str]]:
    """The file's lines. Raises TraceError if there is none."""
    file = Path(path)
    if not file.is_file():
        raise TraceError(f"{path}: no such file; give a trace's path, or a rate for generated arrivals")
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield lines


def _from_zero(path: str, rows: Iterable[Arrival]) -> Iterator[Arrival]:
    """In their order; one that comes before its predecessor (logs are written as requests end) comes with it."""
    first = latest = None
    for row in rows:
        first = row.at_s if first is None else first
        latest = max(row.at_s - first, latest or 0.0)
        yield Arrival(latest, row.num_input, row.num_output, row.hashes)
    if first is None:
        raise TraceError(f"{path}: line 1: holds no request; give a trace with at least one")


# Rows by `yield`, as everything lazy here: a compiler makes lists of generator expressions (simulator/compiled.py).


def _azure_rows(path: str, reader: csv.DictReader[str]) -> Iterator[Arrival]:
    for row in reader:
        yield _azure_row(path, reader.line_num, row)


def _mooncake_rows(path: str, lines: Iterable[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _mooncake_row(path, number, line)


def _azure_row(path: str, line: int, row: Mapping[str, str | None]) -> Arrival:
    stamp = row["TIMESTAMP"] or ""
    try:
        at = datetime.fromisoformat(stamp[:26]).replace(tzinfo=UTC)  # stamps have seven decimals, datetime reads six
    except ValueError:
        raise TraceError(f"{path}: line {line}: TIMESTAMP: {stamp!r} is no time; mend or remove the line") from None
    at_s = (at - _EPOCH) / timedelta(seconds=1)
    num_input, num_output = (_count(path, line, name, row[name]) for name in AZURE_COLUMNS[1:])
    return Arrival(at_s, num_input, num_output)


def _mooncake_row(path: str, line: int, text: str) -> Arrival:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"{path}: line {line}: column {error.colno}: is no JSON ({error.msg}); mend or remove the line"
        raise TraceError(problem) from None
    if not isinstance(row, dict):
        raise TraceError(f"{path}: line {line}: is no JSON object; is this a trace of Mooncake's?")
    at_ms, hashes = row.get("timestamp"), row.get("hash_ids", [])
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < 1e15:
        raise TraceError(f"{path}: line {line}: timestamp: {at_ms!r} is no number of milliseconds; mend or remove the line")
    if not isinstance(hashes, list) or not all(isinstance(name, int) for name in hashes):
        raise TraceError(f"{path}: line {line}: hash_ids: must be a list of whole numbers; mend or remove the line")
    num_input, num_output = (_count(path, line, name, row.get(name)) for name in ("input_length", "output_length"))
    return Arrival(at_ms / 1e3, num_input, num_output, tuple(hashes[: num_input // BLOCK_TOKENS]))


def _count(path: str, line: int, column: str, value: object) -> int:
    """At least one: a request without output still draws a token."""
    try:
        count = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    except ValueError:
        count = -1
    if count < 0:
        raise TraceError(f"{path}: line {line}: {column}: {value!r} is no number of tokens; mend or remove the line")
    return max(1, count)
