"""Waiting for several things at once, so that nothing that was begun outlives who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvtransfer.errors import PushFailed

LAST_WORD_S = 0.2  # for a refusal that may lie unread on a broken connection

T = TypeVar("T")


async def all_or_first_error(*work: Coroutine[object, object, T]) -> list[T]:
    """All results; or an error, once the others are cancelled and have ended. When a connection breaks the others get a
    moment: the receiver may have said to one of them why, and that is worth more than a broken pipe."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if others and any(isinstance(task.exception(), ConnectionError) for task in done):
            done |= (await asyncio.wait(others, timeout=LAST_WORD_S, return_when=asyncio.FIRST_EXCEPTION))[0]
        for task in sorted(done, key=lambda task: not isinstance(task.exception(), PushFailed)):
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def settled(copy: Future[None]) -> None:
    """Returns when the device is through, and not before, however often it is cancelled. Raises what the copy did."""
    await all_settled([copy])


async def all_settled(copies: Sequence[Future[None]]) -> None:
    """Of all of them; the first error counts, a cancellation before any."""
    errors = await all_ended(copies)
    if errors:
        raise errors[0]


async def all_ended(works: Sequence[Future[Any]]) -> list[BaseException]:
    """What they raised, once all are over; a cancellation is raised then, and not before."""
    waiting = [asyncio.wrap_future(work) for work in works]
    cancelled: asyncio.CancelledError | None = None
    while not all(each.done() for each in waiting):
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
    errors = [error for each in waiting if (error := each.exception()) is not None]
    if cancelled is not None:
        raise cancelled
    return errors


async def ended(task: asyncio.Task[T]) -> None:
    """Returns when the task has ended, and not before, however often the caller is cancelled. Its outcome is not raised."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
    if not task.cancelled():
        task.exception()  # seen
    if cancelled is not None:
        raise cancelled
