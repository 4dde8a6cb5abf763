"""Grids of shapes that stay small: not every combination, but every two values together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows, one value of each factor, in which each value of a factor meets each value of every other at least once. Greedy, and
    always the same ones."""
    missing = {
        ((one, i), (two, j))
        for one, two in combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[two]))
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for name in sorted(factors.keys() - row.keys()):
            row[name] = max(range(len(factors[name])), key=lambda index: _met(missing, {**row, name: index}))
        ordered = {name: row[name] for name in factors}
        missing -= set(combinations(ordered.items(), 2))
        rows.append({name: factors[name][index] for name, index in ordered.items()})
    return rows


def _met(missing: set[Pair], row: dict[str, int]) -> int:
    """How many of the pairs that are missing the row has."""
    return sum((one, two) in missing or (two, one) in missing for one, two in combinations(row.items(), 2))


def name_of(row: dict[str, Any]) -> str:
    """For a test's identity."""
    return "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in row.items())
