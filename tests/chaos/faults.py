"""How each kind of fault is dealt and mended.

At a state, a failpoint of the victim acts first (`action`): it strikes by itself (kill, pause), or dwells so that we strike while
the worker is there. Then `strike`, the time of the plan, `mend`. `strike` says whether anything was there to be struck.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path

from tests.chaos.hosts import MemoryGroup
from tests.chaos.links import Link
from tests.chaos.mesh import ChaosMesh, Victim
from tests.chaos.plan import WORKERS, Kind, LinkName, PlannedFault

DWELL = "delay:150@1"
_SLOW_DELAY_S = 0.01
_LOST_SHARE = 0.5
_LOOK_S = 0.01
_RUNS_S, _STANDS_S = 0.01, 0.09
"""Of a process that gets a tenth of the time."""


class Fault(ABC):
    """One fault under way; `action` is what the failpoint does at a state."""

    action = DWELL

    def __init__(self, planned: PlannedFault, victim: Victim, mesh: ChaosMesh) -> None:
        self.planned = planned
        self.victim = victim
        self.mesh = mesh

    @abstractmethod
    async def strike(self) -> bool:
        """Deals it; False: there was nothing to be struck."""

    async def mend(self) -> None:  # noqa: B027  nothing, unless a kind says otherwise
        """Takes it back; called whenever `strike` was."""


class Kill(Fault):
    """The process ends without a word, and another takes its place."""

    action = "kill@1"

    async def strike(self) -> bool:
        if not self.planned.at_state:
            await self.mesh.kill(self.victim)
        return True

    async def mend(self) -> None:
        await self.mesh.restart(self.victim)


class Stop(Fault):
    """The process stands still, as on a machine that swaps or whose hypervisor paused it."""

    action = "pause@1"

    async def strike(self) -> bool:
        if not self.planned.at_state:
            self.victim.member.kill(signal.SIGSTOP)
        return True

    async def mend(self) -> None:
        self.victim.member.kill(signal.SIGCONT)


class Restart(Fault):
    """A rollout's: the process drains and ends, another takes its place."""

    async def strike(self) -> bool:
        await self.mesh.restart(self.victim)
        return True


class SlowProcess(Fault):
    """The process is ten times as slow: it stands still most of the time, and runs every now and then."""

    _turns: asyncio.Task[None] | None = None

    async def strike(self) -> bool:
        self._turns = asyncio.create_task(self._take_turns())
        return True

    async def mend(self) -> None:
        if self._turns is not None:
            self._turns.cancel()
            await asyncio.gather(self._turns, return_exceptions=True)
        self.victim.member.kill(signal.SIGCONT)

    async def _take_turns(self) -> None:
        while True:
            self.victim.member.kill(signal.SIGSTOP)
            await asyncio.sleep(_STANDS_S)
            self.victim.member.kill(signal.SIGCONT)
            await asyncio.sleep(_RUNS_S)


class LinkFault(Fault):
    """Of one link; which one is decided when it is struck."""

    _link: Link | None = None

    @property
    def link(self) -> Link:
        """KV goes to decode workers: for a prefill worker, the transfer link is the one in use, if any. In a pull KV goes to the
        worker that asks, from the one that sends to any other. A link without a connection cannot be felt; then it is the
        victim's control link."""
        if self._link is None:
            busy = [link for link in self._transfer_links if link.num_connections]
            wants_transfer = self.planned.link is LinkName.TRANSFER
            self._link = busy[-1] if wants_transfer and busy else self.victim.links[LinkName.CONTROL]
        return self._link

    @property
    def _transfer_links(self) -> list[Link]:
        owners = [self.victim] if self.victim.role == "decode" else [v for v in self.mesh.victims if v.role == "decode"]
        if self.planned.state == "pull.ask":
            owners = [self.victim]
        elif self.planned.state == "pull.send":
            owners = [v for v in self.mesh.victims if v.role in WORKERS and v is not self.victim]
        return [owner.links[LinkName.TRANSFER] for owner in owners]


class Reset(LinkFault):
    async def strike(self) -> bool:
        return self.link.reset() > 0


class BlackHole(LinkFault):
    async def strike(self) -> bool:
        self.link.black_hole()
        return True

    async def mend(self) -> None:
        self.link.mend()


class Drop(LinkFault):
    async def strike(self) -> bool:
        return self.link.drop() > 0


class Slow(LinkFault):
    async def strike(self) -> bool:
        self.link.slow(delay_s=_SLOW_DELAY_S, bytes_per_s=self.planned.amount)
        return True

    async def mend(self) -> None:
        self.link.mend()


class Lossy(LinkFault):
    async def strike(self) -> bool:
        self.link.lose(_LOST_SHARE)
        return True

    async def mend(self) -> None:
        self.link.mend()


class ShmFull(Fault):
    """The decode worker that takes KV over shared memory cannot map a peer's pool. Felt by the next push to it, or not dealt."""

    async def strike(self) -> bool:
        self.mesh.shm_victim.arming.arm("shm.map", "full")
        return await self.mesh.shm_victim.arming.until_hit("shm.map", self.planned.hold_s)

    async def mend(self) -> None:
        self.mesh.shm_victim.arming.disarm("shm.map")


class RedisStop(Fault):
    async def strike(self) -> bool:
        self.mesh.registry.pause()
        return True

    async def mend(self) -> None:
        self.mesh.registry.go_on()


class RedisEmpty(Fault):
    async def strike(self) -> bool:
        await self.mesh.registry.empty()
        return True


class RedisRestart(Fault):
    async def strike(self) -> bool:
        await self.mesh.registry.kill()
        return True

    async def mend(self) -> None:
        await self.mesh.registry.start()


class ClockJump(Fault):
    async def strike(self) -> bool:
        self.victim.clock.jump(self.planned.amount)
        return True

    async def mend(self) -> None:
        self.victim.clock.jump(0.0)


class DiskFull(Fault):
    """No file of the process may grow: logs, shared memory. The limit is the process's own, so that no other one is struck."""

    _former = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    async def strike(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            self._former = resource.prlimit(self.victim.member.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.victim.member.pid, resource.RLIMIT_FSIZE, (0, self._former[1]))
        return True

    async def mend(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.victim.member.pid, resource.RLIMIT_FSIZE, self._former)


class LogStands(Fault):
    """The log of the process is taken by nothing for a while, and the pipe that it goes into is full."""

    _reading: asyncio.ReadTransport | None = None

    async def strike(self) -> bool:
        self._reading = self.victim.log_pipe()
        self._reading.pause_reading()
        try:
            fill_pipe(f"/proc/{self.victim.member.pid}/fd/2")
        except FileNotFoundError:  # it has ended
            return False
        return True

    async def mend(self) -> None:
        if self._reading is not None and not self._reading.is_closing():
            self._reading.resume_reading()


def fill_pipe(path: str) -> None:
    """Write into a pipe until it takes no more."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(descriptor, b".\n")
    finally:
        os.close(descriptor)


class OutOfMemory(Fault):
    """A control group that has next to no memory left. Not dealt where the process needs none meanwhile."""

    _was_killed = False

    async def strike(self) -> bool:
        self.mesh.expect_death(self.victim)
        group = MemoryGroup()
        try:
            group.take(self.victim.member.pid)
            for _ in range(round(self.planned.hold_s / _LOOK_S)):
                if not self.victim.member.running:
                    break
                await asyncio.sleep(_LOOK_S)
        finally:
            group.close()
        await asyncio.sleep(10 * _LOOK_S)  # it may be killed at the last moment
        self._was_killed = not self.victim.member.running
        return self._was_killed

    async def mend(self) -> None:
        if self._was_killed:
            await self.mesh.restart(self.victim)
        else:
            self.mesh.expect_life(self.victim)


class RankKill(Fault):
    """One of the processes that compute a worker's model together ends without a word: the worker cannot go on."""

    async def strike(self) -> bool:
        ranks = children_of(self.victim.member.pid)
        if not ranks:
            return False
        self.mesh.expect_death(self.victim)
        os.kill(ranks[int(self.planned.pick * len(ranks))], signal.SIGKILL)
        return True

    async def mend(self) -> None:
        await self.mesh.restart(self.victim)


def children_of(pid: int) -> list[int]:
    """Return the process ids of the children of a process, of any of its threads (Linux)."""
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


class Unplugged(Fault):
    """The host of the victim is off the network; its processes run on."""

    async def strike(self) -> bool:
        self.mesh.network.unplug(self.victim.name)
        return True

    async def mend(self) -> None:
        self.mesh.network.plug(self.victim.name)


class Partition(Fault):
    """The victim and one other host do not reach each other. The other one, which may be the one that is spared, is well: all
    others reach it."""

    ways = 2

    async def strike(self) -> bool:
        others = [victim.name for victim in self.mesh.victims if victim is not self.victim]
        other = others[int(self.planned.pick * 997) % len(others)]
        pairs = ((self.victim.name, other), (other, self.victim.name))
        first = int(self.planned.pick * 9973) % 2
        self._cut = pairs if self.ways == 2 else pairs[first : first + 1]
        for source, target in self._cut:
            self.mesh.network.cut(source, target)
        return True

    async def mend(self) -> None:
        for source, target in self._cut:
            self.mesh.network.heal(source, target)


class OneWay(Partition):
    """What one of the two sends does not reach the other."""

    ways = 1


class KVDiskFull(Fault):
    async def strike(self) -> bool:
        return self.mesh.disk_of(self.victim).fill()

    async def mend(self) -> None:
        self.mesh.disk_of(self.victim).make_room()


class KVDiskReadOnly(Fault):
    _is_struck = False

    async def strike(self) -> bool:
        self._is_struck = await asyncio.to_thread(self.mesh.disk_of(self.victim).set_read_only)
        return self._is_struck

    async def mend(self) -> None:
        if self._is_struck:
            await asyncio.to_thread(self.mesh.disk_of(self.victim).set_writable)


class KVDiskSlow(Fault):
    async def strike(self) -> bool:
        self.mesh.disk_of(self.victim).slow(self.planned.amount)
        return True

    async def mend(self) -> None:
        self.mesh.disk_of(self.victim).slow(0.0)


class KVBits(Fault):
    async def strike(self) -> bool:
        return self.mesh.disk_of(self.victim).flip(random.Random(self.planned.pick)) > 0


class KVCut(Fault):
    async def strike(self) -> bool:
        return self.mesh.disk_of(self.victim).cut(random.Random(self.planned.pick)) > 0


class KVRemoved(Fault):
    async def strike(self) -> bool:
        return self.mesh.disk_of(self.victim).remove(random.Random(self.planned.pick)) > 0


KINDS: dict[Kind, type[Fault]] = {
    Kind.KILL: Kill,
    Kind.STOP: Stop,
    Kind.RESTART: Restart,
    Kind.RESET: Reset,
    Kind.BLACK_HOLE: BlackHole,
    Kind.DROP: Drop,
    Kind.SLOW: Slow,
    Kind.LOSSY: Lossy,
    Kind.SLOW_PROCESS: SlowProcess,
    Kind.SHM_FULL: ShmFull,
    Kind.REDIS_STOP: RedisStop,
    Kind.REDIS_EMPTY: RedisEmpty,
    Kind.REDIS_RESTART: RedisRestart,
    Kind.CLOCK: ClockJump,
    Kind.DISK_FULL: DiskFull,
    Kind.LOG_STANDS: LogStands,
    Kind.OUT_OF_MEMORY: OutOfMemory,
    Kind.RANK_KILL: RankKill,
    Kind.UNPLUGGED: Unplugged,
    Kind.PARTITION: Partition,
    Kind.ONE_WAY: OneWay,
    Kind.KV_DISK_FULL: KVDiskFull,
    Kind.KV_DISK_READ_ONLY: KVDiskReadOnly,
    Kind.KV_DISK_SLOW: KVDiskSlow,
    Kind.KV_BITS: KVBits,
    Kind.KV_CUT: KVCut,
    Kind.KV_REMOVED: KVRemoved,
}
ENDS_PROCESS = frozenset({Kind.KILL, Kind.RESTART, Kind.RANK_KILL, Kind.OUT_OF_MEMORY})
_OF_REDIS = frozenset({Kind.REDIS_STOP, Kind.REDIS_EMPTY, Kind.REDIS_RESTART})
_OF_SHM = frozenset({Kind.SHM_FULL})


def make_fault(planned: PlannedFault, victim: Victim, mesh: ChaosMesh) -> Fault:
    """The fault that `planned` names."""
    return KINDS[planned.kind](planned, victim, mesh)


@contextlib.asynccontextmanager
async def alone(kind: Kind, mesh: ChaosMesh) -> AsyncIterator[None]:
    """Holds what there is only one of: two faults of it would mend each other."""
    if kind in _OF_REDIS:
        async with mesh.registry.busy:
            yield
    elif kind in _OF_SHM:
        async with mesh.shm_busy:
            yield
    else:
        yield
