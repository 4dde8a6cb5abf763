"""Runs of scenarios in child processes, each a copy of the same prepared process.

A child runs a batch of cases, one after the other, each in a world of its own: to copy the process costs as much as half a run.
What a run leaves is kept until its child ends, so that no destructor of one works in the next. A case with a violation is run
again in a child of its own, and has to end at the same event: the batch is no part of what happens.
"""

from __future__ import annotations

import os
import pickle
import resource
import selectors
import signal
import struct
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO

from tests.simulation.shrinking.reduction import WHOLE, Reduction

BATCH = 8
TIMEOUT_S = 60
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Case:
    """What is run: the scenario of a seed, or what a reduction leaves of it."""

    seed: int
    reduction: Reduction = WHOLE

    @property
    def command(self) -> str:
        """Return the command that replays it."""
        return " ".join(["python -m tests.simulation.run --seed", str(self.seed), *self.reduction.arguments()])


@dataclass(frozen=True)
class Ran:
    """How a case ended."""

    case: Case
    violations: tuple[str, ...]
    digest: int = 0
    virtual_s: float = 0.0
    num_events: int = 0
    log: tuple[str, ...] = ()


def run_case(case: Case, *, log: bool = False) -> tuple[Ran, Any]:
    """Run a case in this process; return how it ended, and what must be kept until the process ends."""
    from tests.simulation.profiles import scenario
    from tests.simulation.simulate import Run

    run = Run(case.reduction.of(scenario(case.seed)), log=log)
    try:
        outcome = run.run()
    except BaseException:  # noqa: BLE001  reported
        violations = (*run.violations, traceback.format_exc())
        return Ran(case, violations, log=tuple(run.world.log or ())), run
    log_lines = tuple(run.world.log or ())
    return Ran(case, tuple(outcome.violations), outcome.digest, outcome.virtual_s, outcome.num_events, log_lines), run


def run_alone(case: Case, *, log: bool = False) -> Ran:
    """Run a case in a child process of its own."""
    [ran] = outcomes([case], batch=1, log=log)
    return ran


def children_cpu_s() -> float:
    """Return the CPU time of all children that have ended, copying included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def outcomes(
    cases: Iterable[Case], *, num_children: int = 1, batch: int = BATCH, log: bool = False, timeout_s: int = TIMEOUT_S
) -> Iterator[Ran]:
    """Run cases in `num_children` processes at a time, and yield how each ended, as it ends; no process is left afterwards."""
    waiting = iter(cases)
    again: deque[list[Case]] = deque()  # run before what waits
    seen: dict[Case, Ran] = {}  # violations of cases that are run again, alone
    children = selectors.DefaultSelector()
    try:
        while True:
            while len(children.get_map()) < num_children:
                chosen = again.popleft() if again else list(islice(waiting, batch))
                if not chosen:
                    break
                child = _Child.start(chosen, log=log, timeout_s=timeout_s)
                children.register(child.pipe, selectors.EVENT_READ, child)
            if not children.get_map():
                return
            for key, _ in children.select():
                child = key.data
                for ran in child.read():
                    if ran.violations and len(child.cases) > 1:
                        seen[ran.case] = ran
                        again.append([ran.case])
                    else:
                        yield _compared(ran, seen.pop(ran.case, None))
                if child.is_over:
                    children.unregister(child.pipe)
                    child.close()
                    if child.cases[child.num_done :]:
                        again.append(child.cases[child.num_done :])
    finally:
        for key in list(children.get_map().values()):
            key.data.kill()


def _compared(alone: Ran, before: Ran | None) -> Ran:
    if before is None or before.digest == alone.digest:
        return alone
    differ = f"the run ended at another event alone than behind others, where it violated: {before.violations[0]}"
    return Ran(alone.case, (*alone.violations, differ), alone.digest, alone.virtual_s, alone.num_events, alone.log)


@dataclass(eq=False)
class _Child:
    """A process that runs cases, and the pipe that it writes to."""

    pid: int
    pipe: BinaryIO
    cases: list[Case]
    num_done: int = 0
    is_over: bool = False
    _received: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, cases: list[Case], *, log: bool, timeout_s: int) -> _Child:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            _run_all(cases, writing, log=log, timeout_s=timeout_s)
        os.close(writing)
        return cls(pid, os.fdopen(reading, "rb", buffering=0), cases)

    def read(self) -> list[Ran]:
        """Return the outcomes that have come. A child that ends before its time has failed at the case that it was at."""
        data = os.read(self.pipe.fileno(), 1 << 20)
        self._received += data
        come: list[Ran] = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            come.append(pickle.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        self.num_done += len(come)
        self.is_over = not data
        if self.is_over and self.num_done < len(self.cases):
            come.append(Ran(self.cases[self.num_done], ("the run did not end",)))
            self.num_done += 1
        return come

    def close(self) -> None:
        self.pipe.close()
        os.waitpid(self.pid, 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.close()


def _run_all(cases: list[Case], writing: int, *, log: bool, timeout_s: int) -> None:
    """Run the cases and end this process."""
    kept: list[Any] = []
    status = 1
    try:
        with os.fdopen(writing, "wb") as pipe:
            for case in cases:
                signal.alarm(timeout_s)
                ran, left = run_case(case, log=log)
                kept.append(left)
                data = pickle.dumps(ran)
                pipe.write(_LENGTH.pack(len(data)) + data)
                pipe.flush()
        status = 0
    finally:
        os._exit(status)
