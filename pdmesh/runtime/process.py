"""The life of a service process: ready line, signals, drain, exit code.

    async def main(life: Lifecycle) -> None:
        server = ...
        port = await server.start()
        life.ready(server.address)             # one JSON line on stdout: {"ready": true, "address": "..."}
        await life.wait_for_stop()             # SIGTERM, SIGINT, life.stop(...) or life.fail(...)
        await server.drain(grace_s)

    end(run(main, exit_with_parent=config.exit_with_parent))

Exit codes: 0 stopped as asked; 1 `main` raised or `life.fail` was called; 2 a setting is wrong (ConfigError: one line on stderr);
128 + signal after a second signal, which ends the process at once.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import pkgutil
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

from pdmesh.platform import capabilities, fallbacks, parent_death, time_slices
from pdmesh.platform.capabilities import PROC
from pdmesh.runtime.config import EXIT_USAGE, ConfigError

EXIT_FAILED = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


class Lifecycle:
    """Connect a service's `main` with the process around it. On the event loop's thread only.

    A stop that comes while `main` still starts (neither ready nor waiting for the stop) cancels it."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self.stop_reason = ""
        self.error: BaseException | None = None

    @property
    def stopping(self) -> bool:
        """Return whether the process has been asked to stop, or has failed."""
        return self._stop.is_set()

    def ready(self, address: str, **fields: str | int | float | bool) -> None:
        """Announce on stdout, as one JSON line, that the service answers at `address`. Launchers and tests wait for it."""
        self._starting = None
        _print_line({"ready": True, "address": address, "pid": os.getpid(), **fields})

    def progress(self, text: str) -> None:
        """Tell a waiting launcher, as a JSON line on stdout, what a slow start is doing."""
        _print_line({"progress": text})

    async def wait_for_stop(self) -> str:
        """Wait until the process is to stop; return the reason."""
        self._starting = None
        await self._stop.wait()
        return self.stop_reason

    def stop(self, reason: str) -> None:
        """Ask `main` to drain and return. The first reason is kept."""
        if not self.stopping:
            self.stop_reason = reason
            logger.info("stopping: %s", reason)
            self._stop.set()
            if self._starting is not None:
                self._starting.cancel()

    def fail(self, error: BaseException) -> None:
        """Stop for an error that the process cannot survive; it exits with code 1."""
        if self.error is None:
            self.error = error
            logger.critical("fatal: %s", error, exc_info=error)
        self.stop(f"fatal: {error}")

    async def run(self, main: Main) -> None:
        """Run `main` to its end. Its errors are raised, but not the cancellation by `stop`."""
        task = self._starting = asyncio.create_task(_coroutine(main, self), name="main")
        try:
            await task
        except asyncio.CancelledError:
            if not self.stopping or not task.cancelled():
                raise


Main = Callable[[Lifecycle], Awaitable[None]]


async def _coroutine(main: Main, life: Lifecycle) -> None:
    await main(life)


def run(main: Main, *, exit_with_parent: bool = False) -> int:
    """Run `main` on a new event loop until it returns; the exit code is for `end`."""
    forbid_core_dumps()
    try:
        capabilities.taken_away()
    except ValueError as error:
        print(f"{_program()}: {error}", file=sys.stderr)
        return EXIT_USAGE
    if exit_with_parent:
        parent_death.exit_with_parent()
    time_slices.answer_soon()
    return asyncio.run(run_until_signal(main))


def end(code: int) -> NoReturn:
    """End the process with `code` as the interpreter does: threads end, what is registered for the exit runs, and streams are
    flushed. But no module is taken down, which takes 0.4 s of processor where torch is imported: the system takes all back."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or there was none
            stream.flush()
    os._exit(code)


def forbid_core_dumps() -> None:
    """Keep prompts and keys out of core dumps. The hard limit stays: `prlimit` can allow a dump of one process."""
    with contextlib.suppress(ImportError):  # Windows has none
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


async def run_until_signal(main: Main) -> int:
    """Run `main`; SIGTERM or SIGINT asks it to stop, a second signal ends the process at once. Return the exit code."""
    life = Lifecycle()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, _on_signal, life, number)
    try:
        await life.run(main)
    except ConfigError as error:
        print(f"{_program()}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as error:  # noqa: BLE001 - logged by fail
        life.fail(error)
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
    return EXIT_FAILED if life.error is not None else 0


def _on_signal(life: Lifecycle, number: signal.Signals) -> None:
    if life.stopping:
        logger.warning("%s again: exiting at once", number.name)
        logging.shutdown()
        os._exit(128 + number)
    life.stop(number.name)


def _program() -> str:
    """Return the program's name: for `python -m NAME`, whose path ends in NAME/__main__.py, NAME."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def _print_line(content: dict[str, object]) -> None:
    print(json.dumps(content), flush=True)


# The identity of a process: its incarnation and its host.


def new_epoch() -> int:
    """Return 64 random bits, never zero (on the wire zero means "any"). Drawn once at the start of a worker; compared for
    equality only."""
    return secrets.randbits(64) or 1


@cache
def host_id() -> str:
    """Return an id that is equal for two processes iff they share a running kernel and a network namespace, so that an abstract
    Unix socket joins them."""
    return f"{_boot_id()}:{_network_namespace()}"


def _boot_id() -> str:
    identity = fallbacks.text(Path("/proc/sys/kernel/random/boot_id"))
    return socket.gethostname() if identity is None else identity.strip()  # without it the name is the best available


def _network_namespace() -> str:
    if PROC.is_taken:
        return "0"
    try:
        return os.readlink("/proc/self/ns/net").removeprefix("net:").strip("[]")
    except OSError:
        return "0"


# Programs that other packages start without importing them.
#
# `python -m prefill_service` is a worker with one role, and the worker is made of `prefill_service`. It is found by its name when
# the program starts, so that imports point one way: these strings are the one exception that no import contract sees.


PROGRAMS = {
    "prefill_service": "pdmesh.worker.main:prefill_main",
    "decode_service": "pdmesh.worker.main:decode_main",
}


def start(program: str) -> None:
    """Run a program until it ends. Raises KeyError for one that is not listed."""
    pkgutil.resolve_name(PROGRAMS[program])()
