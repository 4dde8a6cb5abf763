"""Which row of a graph a sequence decodes in, and what of its numbers the device does not have yet. Pure: no tensor on a device.

A sequence keeps its row from step to step, so that of its block table, which is the long part, only a new block is sent. Steps do
not name their sequences; but the block that a sequence writes to is its own alone (a shared one is copied first), so it is known
again by it:

    step n     table 4 9 7        writes to 7                   row 0 is held by 7
    step n+1   table 4 9 7        writes to 7   ─► row 0        nothing to send
    step n+1   table 4 9 7 3      writes to 3, behind 7         row 0 too; column 3 becomes 3

That is a guess about rows and no more: what a row's table lacks is found by comparing it with the one that was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowPlan:
    """`rows[i]`: of the batch's i-th sequence. `added`: the last column of its row's table is new, by sequence. `rewritten`:
    sequences whose row gets its whole table."""

    rows: list[int]
    added: list[int]
    rewritten: list[int]


class DecodeRows:
    """What the device holds, as the host remembers it."""

    def __init__(self, num_rows: int) -> None:
        self._tables: list[list[int]] = [[] for _ in range(num_rows)]
        self._row_of: dict[int, int] = {}  # by the block that was written to last

    def place(self, tables: Sequence[list[int]], num_rows: int) -> RowPlan:
        """Rows below `num_rows` for sequences with these block tables; each ends with the block that the step writes to."""
        taken: set[int] = set()
        rows = [self._known_row(table, num_rows, taken) for table in tables]
        free = (row for row in range(num_rows) if row not in taken)
        placed = [next(free) if row is None else row for row in rows]
        added: list[int] = []
        rewritten: list[int] = []
        for index, (row, table) in enumerate(zip(placed, tables, strict=True)):
            held = self._tables[row]
            if held == table:
                continue
            is_next = len(held) == len(table) - 1 and table[:-1] == held
            if is_next or held[: len(table)] != table:
                (added if is_next else rewritten).append(index)
            self._tables[row] = table
        self._row_of = {table[-1]: row for row, table in zip(placed, tables, strict=True)}
        return RowPlan(placed, added, rewritten)

    def _known_row(self, table: list[int], num_rows: int, taken: set[int]) -> int | None:
        for block in table[:-3:-1]:  # the last, and the one before it
            row = self._row_of.get(block)
            if row is not None and row < num_rows and row not in taken:
                taken.add(row)
                return row
        return None
