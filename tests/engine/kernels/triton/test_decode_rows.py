"""Sequences keep their rows, and what is sent for them is what the device lacks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.kernels.triton.cuda_graphs import DecodeRows, RowPlan


def test_a_row_is_kept_and_a_block_is_added() -> None:
    rows = DecodeRows(4)
    assert rows.place([[4, 9], [5]], 4) == RowPlan([0, 1], [1], [0])
    assert rows.place([[4, 9], [5]], 4) == RowPlan([0, 1], [], [])
    assert rows.place([[4, 9, 3], [5]], 4) == RowPlan([0, 1], [0], [])


def test_who_goes_on_moves_no_other() -> None:
    rows = DecodeRows(4)
    rows.place([[1], [2], [3]], 4)
    assert rows.place([[2], [3]], 4) == RowPlan([1, 2], [], [])
    assert rows.place([[2], [3], [1]], 4) == RowPlan([1, 2, 0], [], [])  # its table is there still
    assert rows.place([[2, 7], [8, 9, 6]], 4) == RowPlan([1, 0], [0], [1])


def test_a_smaller_bucket_takes_in_who_is_behind_it() -> None:
    rows = DecodeRows(8)
    rows.place([[block] for block in range(6)], 8)
    assert rows.place([[4], [5], [1]], 4) == RowPlan([0, 2, 1], [], [0, 1])


@st.composite
def histories(draw: st.DrawFn) -> list[list[list[int]]]:
    """Steps of sequences that grow by a block, stay, end, come, or come back with other blocks. No two write to one block."""
    steps, tables, fresh = [], dict[int, list[int]](), iter(range(10_000))
    for step in range(draw(st.integers(1, 12))):
        for name in list(tables):
            match draw(st.sampled_from(["stay", "stay", "grow", "grow two", "end", "move"])):
                case "grow":
                    tables[name] = [*tables[name], next(fresh)]
                case "grow two":
                    tables[name] = [*tables[name], next(fresh), next(fresh)]
                case "end":
                    del tables[name]
                case "move":
                    tables[name] = [next(fresh) for _ in tables[name]]
        shared = draw(st.lists(st.integers(20_000, 20_003), max_size=2))
        for index in range(draw(st.integers(0, 8 - len(tables)))):
            tables[100 * step + index] = [*shared, next(fresh)]
        if tables:
            steps.append(list(tables.values()))
    return steps


@given(histories(), st.lists(st.integers(0, 1), min_size=12, max_size=12))
def test_the_device_has_every_table(steps: list[list[list[int]]], wide: list[int]) -> None:
    rows, device = DecodeRows(8), [[-1] * 40 for _ in range(8)]
    for tables, is_wide in zip(steps, wide, strict=False):
        num_rows = 8 if is_wide or len(tables) > 4 else 4
        plan = rows.place(tables, num_rows)
        for index in plan.added:
            device[plan.rows[index]][len(tables[index]) - 1] = tables[index][-1]
        for index in plan.rewritten:
            device[plan.rows[index]][: len(tables[index])] = tables[index]
        assert len(set(plan.rows)) == len(tables)
        assert all(row < num_rows for row in plan.rows)
        for row, table in zip(plan.rows, tables, strict=True):
            assert device[row][: len(table)] == table
