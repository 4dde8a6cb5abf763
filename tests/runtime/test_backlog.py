"""The bounded queue of one reader: it drops all, and never grows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.backlog import Backlog


async def test_items_come_in_order_behind_a_restart() -> None:
    backlog = Backlog[int](10)
    backlog.put(1, 1)  # before the reader has a state
    assert await backlog.get() is None
    backlog.restart()
    for item in (2, 3):
        backlog.put(item, 1)
    assert [await backlog.get(), await backlog.get()] == [2, 3]


async def test_get_waits_for_an_item_a_drop_and_the_end() -> None:
    backlog = Backlog[int](10)
    acts: list[tuple[Callable[[], None], int | None]] = [
        (lambda: backlog.put(7, 1), 7),
        (backlog.drop, None),
        (backlog.close, None),
    ]
    for act, expected in acts:
        backlog.restart()
        waiting = asyncio.create_task(backlog.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        act()
        assert await waiting == expected


@given(st.lists(st.integers(1, 6), max_size=40), st.integers(1, 12))
def test_what_waits_is_bounded_and_has_no_gap(weights: list[int], most: int) -> None:
    backlog = Backlog[int](most)
    backlog.restart()
    for number, weight in enumerate(weights):
        backlog.put(number, weight)
        assert backlog._weight <= most
    told = [item for item, _ in backlog._items]
    assert backlog.has_dropped == (sum(weights) > most)
    assert told == ([] if backlog.has_dropped else list(range(len(weights))))
