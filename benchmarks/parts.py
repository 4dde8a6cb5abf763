"""A benchmark that has several parts: which of them run, one after the other, and who hears of their figures."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

from benchmarks.harness import Figure, say
from benchmarks.router.results import table

Measured = list[Figure] | Awaitable[list[Figure]]


def chosen(only: str, parts: Sequence[str]) -> list[str]:
    """Of `parts` those that `only` names, separated by commas, in their order; all, where it names none. Raises ValueError that
    lists them."""
    wanted = [name for name in only.split(",") if name] or list(parts)
    if unknown := [name for name in wanted if name not in parts]:
        raise ValueError(f"only: there is no part {unknown[0]!r}; there are {', '.join(parts)}")
    return [name for name in parts if name in wanted]


def run(names: Sequence[str], measure: Callable[[str], Measured], keep: Callable[[str, list[Figure]], None]) -> dict[str, str]:
    """Measures each, prints its figures and hands them to `keep` as soon as it is through; returns what failed, and why."""
    failed: dict[str, str] = {}
    measured: list[Figure] = []
    for name in names:
        say(f"==> {name}")
        try:
            found = measure(name)
            figures = asyncio.run(_cancellable(found)) if inspect.isawaitable(found) else found
        except Exception as error:  # noqa: BLE001  # one part that fails must not cost the others
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"{traceback.format_exc()}{name}: failed: {failed[name]}")
            continue
        for figure in figures:
            print(json.dumps(asdict(figure)), flush=True)
        keep(name, figures)
        measured += figures
    say("\n".join(table(measured)))
    return failed


def told(failed: dict[str, str]) -> int:
    """Says what failed; the exit code."""
    for name, why in failed.items():
        say(f"{name}: failed: {why}")
    return 1 if failed else 0


async def _cancellable(figures: Awaitable[list[Figure]]) -> list[Figure]:
    """SIGTERM is taken as Ctrl-C is: everything that was started is ended."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await figures
