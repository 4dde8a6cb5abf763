"""A simulated world: one virtual clock, processes that take turns, and a random number generator that decides everything.

The event loop is asyncio's, but `_run_once` takes the next event of the world, in virtual time. Each process has its own queue of
callbacks, which run in order, as on a loop of its own. The seed decides which process runs next, and how long its callback takes.
A process that is killed runs nothing any more, no `finally` either; one that is frozen goes on where it was.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from heapq import heappop, heappush, heappushpop
from typing import Any, TypeVar

from tests.simulation.environment.socket_loop import SocketCalls

T = TypeVar("T")

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
MICROSECOND = 1_000
CLOCK_TICK_NS = 100
"""What a reading of the clock takes: a loop that waits for a time without giving way comes to its end."""


class Unsimulated(RuntimeError):
    """Something reached for the real machine."""


class Stuck(AssertionError):
    """Nothing can happen any more, and a task still waits."""


@dataclass(eq=False)
class Process:
    """A process of the simulated machine. `slowness`: how many times as long its callbacks take."""

    name: str
    world: World
    offset_ns: int = 0  # its monotonic clock began elsewhere
    clock_ppm: int = 0  # by how much its monotonic clock is fast
    host: str = ""
    wall_skew_ns: int = 0  # by how much its wall clock is wrong
    slowness: float = 1.0
    is_dead: bool = False
    is_frozen: bool = False
    num_freezes: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    ready: deque[SimulatedHandle] = field(default_factory=deque)
    is_scheduled: bool = False
    busy_until_ns: int = 0
    context: Context = field(default_factory=copy_context)

    def __post_init__(self) -> None:
        self.context.run(_process.set, self)

    def now_ns(self) -> int:
        """Return its monotonic clock."""
        return self.world.now_ns + self.offset_ns + self.world.now_ns * self.clock_ppm // 1_000_000

    def world_ns(self, clock_ns: int) -> int:
        """Return when its monotonic clock shows `clock_ns`."""
        return -(-(clock_ns - self.offset_ns) * 1_000_000 // (1_000_000 + self.clock_ppm))

    def later(self, delay_ns: int, callback: Callable[..., object], *args: object) -> None:
        """Call in this process, whatever it is by then; a dead one is not called."""
        self.world.push(self.world.now_ns + delay_ns, self, SimulatedHandle(callback, args, self.context))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task of this process."""
        return self.context.run(self.world.loop.create_task, work)

    def kill(self) -> None:
        """Stop it for ever, in the middle of anything."""
        self.is_dead = True
        self.ready.clear()
        self.world.note("killed", self.name)

    def freeze(self) -> None:
        """Run nothing until `resume`: timers and messages wait."""
        self.is_frozen = True
        self.num_freezes += 1
        self.world.note("frozen", self.name)

    def resume(self) -> None:
        self.is_frozen = False
        self.world.note("resumed", self.name)
        self.world.loop.wake(self)


_process: ContextVar[Process] = ContextVar("process")


class World:
    """One run, determined by its seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.num_events = 0
        self.digest = 0
        self.log: list[str] | None = None
        self.processes: list[Process] = []
        self.loop = SimulatedLoop(self)
        self.outside = self.process("outside")
        self.outside.offset_ns = 0

    def process(self, name: str) -> Process:
        """Make a process."""
        made = Process(name, self, offset_ns=self.rng.randrange(1, 10**6) * SECOND)
        self.processes.append(made)
        return made

    def note(self, *what: object) -> None:
        """Add to what tells two runs apart, and to the log where one is kept."""
        text = f"{self.now_ns} {' '.join(map(str, what))}"
        self.digest = zlib.crc32(text.encode(), self.digest)
        if self.log is not None:
            self.log.append(text)

    def push(self, when_ns: int, process: Process, handle: SimulatedHandle) -> None:
        """Have `handle` run in `process` at a time of the world."""
        self.loop.push(when_ns, process, handle)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run to the end of `main`, a task outside of all processes."""
        return self.loop.run_until_complete(self.outside.start(main))


def current_process() -> Process | None:
    """Return the process whose code runs."""
    return _process.get(None)


class SimulatedHandle:
    """A callback that is to run, as asyncio's `Handle` and `TimerHandle`, of which there are too many in a run to be larger."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_when")

    def __init__(self, callback: Callable[..., object], args: tuple[object, ...], context: Context, when: float = 0.0) -> None:
        self._callback, self._args, self._context, self._when = callback, args, context, when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True  # it is skipped when its time has come
        self._callback, self._args = _ignore, ()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when


def _ignore(*_: object) -> None:
    """Do what a cancelled callback does."""


class SimulatedLoop(SocketCalls, asyncio.BaseEventLoop):  # type: ignore[misc]  # asyncio's have more parameters
    """asyncio's loop on the world's clock."""

    _stopping: bool

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._events: list[tuple[int, int, Process, SimulatedHandle | None]] = []
        self._order = 0
        self.set_task_factory(self._make_task)
        self.listeners: dict[tuple[str, int], object] = {}
        self.grain_ns = 1
        """Timers end at multiples of it: a coarse one lets many end together, and time without requests passes faster."""

    def time(self) -> float:
        return _process.get(self._world.outside).now_ns() / 1e9

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> SimulatedHandle:
        handle = SimulatedHandle(callback, args, copy_context() if context is None else context)
        owner = handle._context.get(_process, self._world.outside)
        if not owner.is_dead:
            owner.ready.append(handle)
            if not owner.is_scheduled:
                self.wake(owner)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> SimulatedHandle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> SimulatedHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> SimulatedHandle:
        timer = SimulatedHandle(callback, args, copy_context() if context is None else context, when)
        owner = timer._context.get(_process, self._world.outside)
        when_ns = owner.world_ns(round(when * 1e9))
        if self.grain_ns > 1:
            when_ns += -when_ns % self.grain_ns
        now_ns = self._world.now_ns
        self.push(when_ns if when_ns > now_ns else now_ns, owner, timer)
        return timer

    def push(self, when_ns: int, process: Process, handle: SimulatedHandle | None) -> None:
        self._order = order = self._order + 1
        heappush(self._events, (when_ns, order, process, handle))

    def wake(self, process: Process) -> None:
        """Give the process its turn, as soon as it is free."""
        if process.ready and not process.is_scheduled and not process.is_frozen:
            process.is_scheduled = True
            self.push(max(self._world.now_ns, process.busy_until_ns), process, None)

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run a function that a thread would run: at once, its result later."""
        future: asyncio.Future[T] = self.create_future()
        process = _process.get(self._world.outside)

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except BaseException as error:  # noqa: BLE001  the caller gets it
                future.set_exception(error)

        process.later(self._world.rng.randrange(10, 2000) * MICROSECOND, run)
        return future

    def _run_once(self) -> None:
        """Run all events until the loop is stopped. An event is a callback whose time has come, or a turn of a process."""
        world, events = self._world, self._events
        nothing: tuple[int, int, Process, SimulatedHandle | None] | None = None
        following = nothing  # an event that is not in the heap: most often it is the next one
        while not self._stopping:
            if following is not None:
                when_ns, _, process, handle = heappushpop(events, following)
                following = None
            elif events:
                when_ns, _, process, handle = heappop(events)
            else:
                raise Stuck("no event is left")
            if when_ns > world.now_ns:
                world.now_ns = when_ns
            if handle is None:
                # It stays scheduled during its turn: what it adds to its queue waits until it is free again.
                if process.ready and not process.is_frozen:
                    self._turn(process)
                process.is_scheduled = False
            elif handle._cancelled or process.is_dead:
                continue
            else:
                process.ready.append(handle)
            if process.ready and not process.is_scheduled and not process.is_frozen:
                process.is_scheduled = True
                self._order = order = self._order + 1
                now_ns, free_ns = world.now_ns, process.busy_until_ns
                following = (free_ns if free_ns > now_ns else now_ns, order, process, None)
        if following is not None:
            heappush(events, following)

    def _turn(self, process: Process) -> None:
        """Run a few callbacks of one process, and charge it their time."""
        world, ready = self._world, process.ready
        getrandbits = world.rng.getrandbits
        for _ in range(min(len(ready), 1 + getrandbits(2))):
            handle = ready.popleft()
            if not handle._cancelled:
                world.num_events += 1
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  as asyncio does
                    context = {"message": f"Exception in callback {handle._callback!r}", "exception": error}
                    handle._context.run(self.call_exception_handler, context)
            if process.is_dead or process.is_frozen:
                return
        pause_ns = (2_000 + getrandbits(14)) * process.slowness
        if not getrandbits(11):
            pause_ns += world.rng.randrange(50) * MILLISECOND  # the system ran something else
        process.busy_until_ns = world.now_ns + round(pause_ns)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        owner = _process.get(self._world.outside) if context is None else context.get(_process, self._world.outside)
        task = asyncio.Task(work, loop=loop, **options)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # a killed process leaves its tasks behind
        owner.tasks.add(task)
        task.add_done_callback(owner.tasks.discard, context=owner.context)
        return task

    def _process_events(self, event_list: Any) -> None:
        raise Unsimulated("a selector")

    def _write_to_self(self) -> None:
        pass
