"""Reads arrivals from public traces of real services, line by line, or draws them at random; and reshapes the load.

Azure's LLM inference traces are CSV (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's are JSON lines (timestamp in ms,
input_length, output_length and hash_ids, one for each block of 512 prompt tokens).
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from router.flow_control.slo_admission import STANDARD

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class TraceError(ValueError):
    """Raised for a trace that cannot be used: file, line, column, the problem and what to do."""


class Arrival(NamedTuple):
    """Describe one request: simulated seconds, lengths in tokens (at least one), names of its prompt's full prefix blocks in
    order."""

    at_s: float
    num_input: int
    num_output: int
    hashes: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = STANDARD


def read_azure(path: str) -> Iterator[Arrival]:
    """Yield Azure's CSV, the first arrival at 0 s. Raises TraceError."""
    with _opened(path) as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}: line 1: {missing[0]}: no such column; is this a trace of Azure's LLM inference data set?")
        yield from _from_zero(path, _azure_rows(path, reader))


def read_mooncake(path: str) -> Iterator[Arrival]:
    """Yield Mooncake's JSON lines, the first arrival at 0 s. Raises TraceError."""
    with _opened(path) as lines:
        yield from _from_zero(path, _mooncake_rows(path, lines))


READERS: Mapping[str, Callable[[str], Iterator[Arrival]]] = {
    "azure-conv": read_azure,
    "azure-code": read_azure,
    "mooncake": read_mooncake,
}


def poisson(rate: float, lengths: Callable[[random.Random], tuple[int, int]], seed: int) -> Iterator[Arrival]:
    """Yield endless independent arrivals, `rate` in a second, each with lengths (input, output) drawn by `lengths`."""
    rng, at_s = random.Random(seed), 0.0
    while True:
        at_s += rng.expovariate(rate)
        num_input, num_output = lengths(rng)
        yield Arrival(at_s, num_input, num_output)


def log_normal(mean_input: float, mean_output: float, sigma: float) -> Callable[[random.Random], tuple[int, int]]:
    """Return a generator of lengths with these means; `sigma` 0: all alike, 1: at least as scattered as in human traffic."""

    def draw(rng: random.Random) -> tuple[int, int]:
        num_input, num_output = (mean * rng.lognormvariate(-sigma * sigma / 2, sigma) for mean in (mean_input, mean_output))
        return max(1, round(num_input)), max(1, round(num_output))

    return draw


@contextmanager
def _opened(path: str) -> Iterator[Iterable[str]]:
    """Yield the file's lines. Raises TraceError if there is none."""
    file = Path(path)
    if not file.is_file():
        raise TraceError(f"{path}: no such file; give a trace's path, or a rate for generated arrivals")
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield lines


def _from_zero(path: str, rows: Iterable[Arrival]) -> Iterator[Arrival]:
    """Yield arrivals in file order; one earlier than its predecessor (logs are written as requests end) gets its predecessor's
    time."""
    first = latest = None
    for row in rows:
        first = row.at_s if first is None else first
        latest = max(row.at_s - first, latest or 0.0)
        yield Arrival(latest, row.num_input, row.num_output, row.hashes)
    if first is None:
        raise TraceError(f"{path}: line 1: holds no request; give a trace with at least one")


# Rows by `yield`: mypyc turns generator expressions into lists (pdmesh/simulator/compiled.py).


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
    """Return a count of at least one: a request without output still draws a token."""
    try:
        count = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    except ValueError:
        count = -1
    if count < 0:
        raise TraceError(f"{path}: line {line}: {column}: {value!r} is no number of tokens; mend or remove the line")
    return max(1, count)


# Other loads from given arrivals: faster, oscillating, with a burst, longer, endless. Pure and lazy: millions pass one by one (by
# `yield`: mypyc turns generator expressions into lists, pdmesh/simulator/compiled.py).
#
# Times are warped, never redrawn: the order stays, and so does the clustering that makes real traces hard.


Warp = Callable[[float], float]


def at_rate(arrivals: Iterable[Arrival], factor: float) -> Iterator[Arrival]:
    """Yield `factor` times as many arrivals in a second."""
    return warped(arrivals, lambda at_s: at_s / factor)


def warped(arrivals: Iterable[Arrival], warp: Warp) -> Iterator[Arrival]:
    """Yield each arrival at `warp` of its time, which must not decrease."""
    for arrival in arrivals:
        yield arrival._replace(at_s=warp(arrival.at_s))


def swing(period_s: float, depth: float) -> Warp:
    """Return a day-and-night warp: a steady stream gets the rate 1 + depth · sin(2π t / period) times its own, so it starts in
    the middle and rises. `depth` is in [0, 1)."""
    wave = 2 * math.pi / period_s

    def count(at_s: float) -> float:
        """Return how much of the steady stream has arrived by `at_s`."""
        return at_s + depth / wave * (1 - math.cos(wave * at_s))

    def warp(steady_s: float) -> float:
        low, high, at_s = max(0.0, steady_s - 2 * depth / wave), steady_s, steady_s
        for _ in range(64):  # Newton's method, kept between bounds
            error = count(at_s) - steady_s
            low, high = (at_s, high) if error < 0 else (low, at_s)
            closer = at_s - error / (1 + depth * math.sin(wave * at_s))
            closer = closer if low <= closer <= high else (low + high) / 2
            if abs(closer - at_s) <= 1e-12 * high:
                return closer
            at_s = closer
        return at_s

    return warp


def burst(start_s: float, factor: float, length_s: float = 60.0) -> Warp:
    """Return a warp with `factor` times the rate for `length_s` from `start_s` on; then as before."""
    taken_s = factor * length_s  # of the steady stream

    def warp(steady_s: float) -> float:
        if steady_s <= start_s:
            return steady_s
        if steady_s < start_s + taken_s:
            return start_s + (steady_s - start_s) / factor
        return steady_s - taken_s + length_s

    return warp


def repeated(again: Callable[[], Iterable[Arrival]], num_requests: int) -> Iterator[Arrival]:
    """Yield `num_requests` of the arrivals, repeated as needed: each round starts after the last at the mean gap. Prefix names of
    each round differ: a conversation does not recur word by word."""
    offset_s, num_left, num_names = 0.0, num_requests, 0
    while num_left:
        latest, count, largest = 0.0, 0, -1
        for arrival in islice(again(), num_left):
            latest, count = arrival.at_s, count + 1
            largest = max(largest, *arrival.hashes) if arrival.hashes else largest
            names = tuple([name + num_names for name in arrival.hashes]) if num_names else arrival.hashes
            yield arrival._replace(at_s=arrival.at_s + offset_s, hashes=names)
        if not count:
            return
        offset_s, num_left, num_names = offset_s + latest + latest / count, num_left - count, num_names + largest + 1


def together(streams: Iterable[Iterable[Arrival]]) -> Iterator[Arrival]:
    """Merge the streams. Prefix names of each are its own."""
    streams = list(streams)
    own = [_named(stream, number, len(streams)) for number, stream in enumerate(streams)]
    return merge(*own, key=lambda arrival: arrival.at_s)


def _named(arrivals: Iterable[Arrival], number: int, of: int) -> Iterator[Arrival]:
    for arrival in arrivals:
        yield arrival._replace(hashes=tuple([name * of + number for name in arrival.hashes]))


def lengths(arrivals: Iterable[Arrival], *, inputs: float = 1.0, outputs: float = 1.0, max_context: int = 0) -> Iterator[Arrival]:
    """Scale the lengths; cut to `max_context` (0: not), the output first, to at least one token. A prompt whose length changes
    keeps the names of the blocks that it still fills."""
    for arrival in arrivals:
        num_input, num_output = max(1, round(arrival.num_input * inputs)), max(1, round(arrival.num_output * outputs))
        if max_context:
            num_input = min(num_input, max_context - 1)
            num_output = min(num_output, max_context - num_input)
        kept = len(arrival.hashes) * num_input // arrival.num_input if num_input < arrival.num_input else len(arrival.hashes)
        yield arrival._replace(num_input=num_input, num_output=num_output, hashes=arrival.hashes[:kept])


def mean_rate(arrivals: Iterable[Arrival]) -> float:
    """Return the requests in a second, over all arrivals; 0 for fewer than two, or without any time between."""
    count, latest = 0, 0.0
    for arrival in arrivals:
        count, latest = count + 1, arrival.at_s
    return (count - 1) / latest if latest else 0.0
