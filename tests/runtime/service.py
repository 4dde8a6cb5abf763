"""A service for the tests of processes: `python -m tests.runtime.service MODE`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from pdmesh.runtime.child import ManagedProcess
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.process import Lifecycle, end, run


async def plain(life: Lifecycle) -> None:
    life.progress("warming up")
    print("a line of its own", flush=True)
    life.ready("127.0.0.1:1", role="test")
    reason = await life.wait_for_stop()
    print(f"drained after {reason}", file=sys.stderr, flush=True)


async def stubborn(life: Lifecycle) -> None:
    life.ready("127.0.0.1:1")
    await life.wait_for_stop()
    print("stopping", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


async def slow_start(life: Lifecycle) -> None:
    life.progress("loading")
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 600)
    life.ready("never")


async def broken(life: Lifecycle) -> None:
    print("about to break", file=sys.stderr, flush=True)
    raise RuntimeError("broken on purpose")


async def misconfigured(life: Lifecycle) -> None:
    raise ConfigError("--port", "cannot listen", "choose another")


async def failing(life: Lifecycle) -> None:
    life.ready("127.0.0.1:1")
    life.fail(RuntimeError("engine lost"))
    await life.wait_for_stop()


async def parent(life: Lifecycle) -> None:
    """Has a child, a stubborn one, and tells its pid."""
    child = ManagedProcess("child", [sys.executable, "-m", "tests.runtime.service", "stubborn"])
    await child.start(30)
    life.ready("127.0.0.1:1", child_pid=child.pid)
    await life.wait_for_stop()
    await child.stop(grace_s=0.1)


async def orphanable(life: Lifecycle) -> None:
    """Started without a `ManagedProcess`, with --exit-with-parent as a pod or a person would."""
    await stubborn(life)


MODES = (plain, stubborn, slow_start, broken, misconfigured, failing, parent, orphanable)

if __name__ == "__main__":
    main = {mode.__name__: mode for mode in MODES}[sys.argv[1]]
    end(run(main, exit_with_parent=os.environ.get("EXIT_WITH_PARENT") == "1"))
