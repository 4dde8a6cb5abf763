"""The engine thread and its bridge to asyncio.

    event loop                               engine thread
    now(fn): fn(engine) ── wakes it ───────► step(), if it slept
    call(fn) ── queue of commands ─────────► fn(engine), between steps
    on_ready(KV) ◄─ a pipe wakes it ──────── step(), after every few layers of a prefill_only request
    on_step(result) ◄─ call_soon_threadsafe ─ step(), one batch of results for each

Neither waits for the other: the event loop queues commands and continues; the engine posts results and continues. What needs no
step does not wait for one either: `now` calls a function of the engine that takes its lock, which a step holds for moments only.
Only an engine with nothing to do, or one that is paused, sleeps, on the queue. Context variables do not cross: spans belong to
the task that calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from pdmesh.engine.errors import EngineStopped
from pdmesh.engine.kv_cache.events import KVEvents
from pdmesh.engine.outputs import KVReady, StepResult
from pdmesh.platform import time_slices

T = TypeVar("T")
_PIPE_BYTES = 1 << 16


class Stepped(Protocol):
    """What the thread needs of an engine: ours, or the one around vLLM's."""

    @property
    def exports(self) -> KVEvents: ...

    def step(self) -> StepResult | None:
        """Run one step. None: nothing to do until another call changes that."""


E = TypeVar("E", bound=Stepped)


@dataclass(frozen=True)
class _Command(Generic[E, T]):
    """A function to run on the engine thread, and the future of its result."""

    fn: Callable[[E], T]
    future: Future[T] = field(default_factory=Future)

    def run(self, engine: E) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.fn(engine))
        except BaseException as error:  # noqa: BLE001  the caller gets it, whatever it is
            self.future.set_exception(error)

    def fail(self, message: str) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineStopped(message))


def _wake(_engine: object) -> None:
    """Do nothing: a command that makes the engine look for work."""


class EngineLoop(Generic[E]):
    """Run an engine in a thread of its own. Everything here but the thread's own functions is called on the event loop.

    `failed` gets the exception of a step() that raised: fatal, the engine's state is unknown and the process should end.
    `on_failure`, if given, is called with it on the event loop. Calls that are pending then, and later ones, raise EngineStopped.
    """

    failed: asyncio.Future[None]

    def __init__(
        self,
        engine: E,
        on_step: Callable[[StepResult], None],
        on_failure: Callable[[BaseException], None] | None = None,
        on_ready: Callable[[tuple[KVReady, ...]], None] | None = None,
    ) -> None:
        """`on_ready` is called during a step with the final KV of prefill_only requests."""
        self._engine = engine
        self._on_step = on_step
        self._on_failure = on_failure
        self._on_ready = on_ready
        self._pipe: tuple[int, int] | None = None
        self._commands: queue.SimpleQueue[_Command[E, object] | None] = queue.SimpleQueue()  # None: stop
        self._closed_reason: str | None = "the engine loop has not been started"
        self._is_paused = False  # read and written by the thread
        self._thread = threading.Thread(target=self._enter, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; results go to `loop`. Once only."""
        self._loop = loop
        self.failed = loop.create_future()
        self._closed_reason = None
        if self._on_ready is not None:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            loop.add_reader(self._pipe[0], self._read_signals, self._pipe[0], self._on_ready)
            self._engine.exports.signal.fd = self._pipe[1]
        self._thread.start()

    def now(self, fn: Callable[[E], T]) -> T:
        """Run `fn` here and at once, also while a step runs; return or raise what it does. It must be safe on any thread.

        Raises EngineStopped when the loop is not running.
        """
        if self._closed_reason is not None:
            raise EngineStopped(self._closed_reason)
        try:
            return fn(self._engine)
        finally:
            self._commands.put(_Command(_wake))

    async def call(self, fn: Callable[[E], T]) -> T:
        """Run `fn` on the engine thread between two steps; return or raise what it does.

        Results of steps before it have been given to on_step by then. Cancelling the wait withdraws a function that has not
        begun; one that has begun runs to its end and its result is lost, so a caller that reserves releases in a `finally`.
        Raises EngineStopped when the loop is not running.
        """
        if self._closed_reason is not None:
            raise EngineStopped(self._closed_reason)
        command = _Command(fn)
        self._commands.put(command)  # type: ignore[arg-type]  # the queue takes commands with any result
        return await asyncio.wrap_future(command.future)

    async def pause(self) -> None:
        """Run no step from now on; functions run as before. It returns when the step under way has ended; idempotent."""
        await self.call(lambda _engine: self._set_paused(is_paused=True))

    async def resume(self) -> None:
        """Run steps again; idempotent."""
        await self.call(lambda _engine: self._set_paused(is_paused=False))

    def _set_paused(self, *, is_paused: bool) -> None:
        self._is_paused = is_paused

    async def stop(self) -> None:
        """Run what was called before, then end the thread and wait for it. Idempotent."""
        if self._closed_reason is None:
            self._closed_reason = "the engine loop was stopped"
            self._commands.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        if self._pipe is not None:
            self._engine.exports.signal.fd = -1
            self._loop.remove_reader(self._pipe[0])
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def _read_signals(self, fd: int, on_ready: Callable[[tuple[KVReady, ...]], None]) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, _PIPE_BYTES)
        ready = self._engine.exports.ready()
        if ready:
            on_ready(ready)

    def _enter(self) -> None:
        time_slices.compute()
        contextvars.Context().run(self._run)

    def _run(self) -> None:
        """Run the engine thread."""
        may_have_work = False
        try:
            while self._run_commands(wait=self._is_paused or not may_have_work):
                if self._is_paused:
                    continue
                result = self._engine.step()
                may_have_work = result is not None
                if result is not None:
                    self._post(self._on_step, result)
        except BaseException as error:  # noqa: BLE001  reported, never swallowed
            self._post(self._fail, error)

    def _run_commands(self, *, wait: bool) -> bool:
        """Run all queued commands, waiting for the first one if `wait`. False: stop."""
        try:
            while (command := self._commands.get(block=wait)) is not None:
                command.run(self._engine)
                wait = False
        except queue.Empty:
            return True
        return False

    def _post(self, callback: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so there is no reader
            self._loop.call_soon_threadsafe(callback, argument)

    def _fail(self, error: BaseException) -> None:
        self._closed_reason = f"the engine failed: {error!r}"
        self._fail_commands(self._closed_reason)
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks it as retrieved: a caller may use on_failure instead of `failed`
        if self._on_failure is not None:
            self._on_failure(error)

    def _fail_commands(self, reason: str) -> None:
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None:
                command.fail(reason)
