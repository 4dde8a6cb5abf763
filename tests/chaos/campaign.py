"""A round of faults in a mesh under load: lanes deal them side by side, and always leave a healthy worker of each kind, and a
healthy router."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

from tests.chaos.faults import ENDS_PROCESS, Fault, Kill, alone, make_fault
from tests.chaos.load import Load
from tests.chaos.mesh import ChaosMesh, Victim
from tests.chaos.plan import ROLES, PlannedFault
from tests.chaos.record import Dealt, Round, with_stalls

REACH_TIMEOUT_S = 4.0
MAX_TRIES = 4
_LATE_HIT_S = 0.02  # from a failpoint's last look at its file to what it does


class Campaign:
    """Deals faults to the workers of `mesh` while `load` asks. `one_at_a_time`: no two at once, so each stall has one cause."""

    def __init__(self, name: str, mesh: ChaosMesh, load: Load, *, one_at_a_time: bool = False) -> None:
        self._name = name
        self._mesh = mesh
        self._load = load
        self._turn: contextlib.AbstractAsyncContextManager[object] = asyncio.Lock() if one_at_a_time else contextlib.nullcontext()
        self._struck = mesh.struck
        self._dealt: list[Dealt] = []
        self._not_dealt: list[int] = []
        self._problems: list[str] = []

    async def round(self, number: int, planned: Sequence[PlannedFault]) -> Round:
        """Deals `planned`, lets the load run out and looks for what was left behind."""
        began = time.monotonic()
        self._dealt, self._not_dealt, self._problems = [], [], []
        async with self._load.running():
            await self._deal_all(planned)
        blocks, problems = await self._mesh.leaks()
        unexpected, self._mesh.unexpected = self._mesh.unexpected, []
        tally = self._load.take_tally()
        return Round(
            campaign=self._name,
            number=number,
            elapsed_s=time.monotonic() - began,
            dealt=with_stalls(self._dealt, tally.waits),
            not_dealt=self._not_dealt,
            tally=tally,
            blocks_leaked=blocks,
            problems=[*self._problems, *unexpected, *problems],
            kv_counts=dict(await self._mesh.take_kv_counts()),
        )

    async def _deal_all(self, planned: Sequence[PlannedFault]) -> None:
        """One lane fewer than workers, for each role: whatever the lanes do, one is left alone."""
        async with asyncio.TaskGroup() as group:
            for role in ROLES:
                queue = deque((fault, 1) for fault in planned if fault.role == role)
                for _ in range(len(self._of_role(role)) - 1):
                    group.create_task(self._lane(queue))

    async def _lane(self, queue: deque[tuple[PlannedFault, int]]) -> None:
        while queue:
            planned, num_tries = queue.popleft()
            async with self._turn:
                with self._claimed(planned) as victim:
                    dealt = await self._deal_watched(planned, victim)
            if dealt:
                continue
            if num_tries < MAX_TRIES:
                queue.append((planned, num_tries + 1))
            else:
                self._not_dealt.append(planned.number)

    @contextlib.contextmanager
    def _claimed(self, planned: PlannedFault) -> Iterator[Victim]:
        """A worker or router that no other lane has."""
        free = [victim for victim in self._of_role(planned.role) if victim.name not in self._struck]
        victim = free[int(planned.pick * len(free))]
        self._struck.add(victim.name)
        try:
            yield victim
        finally:
            self._struck.discard(victim.name)

    async def _deal_watched(self, planned: PlannedFault, victim: Victim) -> bool:
        """A worker that does not come back is a problem to be reported, and started again."""
        if not victim.member.running:  # it died of something else, which is reported
            await self._mesh.restart(victim)
            await self._mesh.until_serving(victim)
        try:
            return await self._deal(planned, victim)
        except TimeoutError:
            self._problems.append(f"{victim.name} did not serve again after {planned.kind} at {planned.state}")
            await self._mesh.restart(victim)
            return True

    async def _deal(self, planned: PlannedFault, victim: Victim) -> bool:
        """False: its state was not reached, or there was nothing to be struck."""
        fault = make_fault(planned, victim, self._mesh)
        ends_process = planned.kind in ENDS_PROCESS
        former_epoch = await self._mesh.epoch_of(victim) if ends_process else 0
        async with alone(planned.kind, self._mesh):
            if not await self._reach(fault):
                return False
            began = time.monotonic()
            if struck := await fault.strike():
                await asyncio.sleep(planned.hold_s)
            await fault.mend()
        serving_s = await self._mesh.until_serving(victim, former_epoch=former_epoch if struck else 0)
        if struck:
            self._dealt.append(
                Dealt(
                    number=planned.number,
                    kind=str(planned.kind),
                    state=planned.state,
                    victim=victim.name,
                    began=began,
                    ended=time.monotonic(),
                    serving_s=serving_s if ends_process else None,
                )
            )
        return struck

    async def _reach(self, fault: Fault) -> bool:
        """Waits until the victim is at the state, where its failpoint acts at once."""
        state, victim = fault.planned.state, fault.victim
        if not fault.planned.at_state:
            return True
        if isinstance(fault, Kill):
            self._mesh.expect_death(victim)
        victim.arming.arm(state, fault.action)
        try:
            reached = await victim.arming.until_hit(state, REACH_TIMEOUT_S)
        finally:
            victim.arming.disarm(state)
        if not reached:
            await asyncio.sleep(_LATE_HIT_S)
            reached = victim.arming.was_hit(state)
        if not reached:
            self._mesh.expect_life(victim)
        return reached

    def _of_role(self, role: str) -> list[Victim]:
        return [victim for victim in self._mesh.victims if victim.role == role]
