"""What goes wrong in a run, done to its members; and the bound on how long a request may wait for its next token.

The bound. Counted from the last token, or from the last moment at which a fault began or ended, a request gets its next token
within STALL_S of virtual time wherever one router, one prefill worker and one decode worker are spared. It is the longest chain
of the product's own limits, each of which is waited for at most once:

     1.2  a client that hears nothing of its router      pdmesh/client/channel.py: keepalive_time 0.4 s + ping_timeout 0.8 s
     2.0  its pause before the next router               pdmesh/client/stream.py: max_backoff_s
     1.0  a worker's stream that is silent               router/config.py: stream_timeout_s
     2.0  time to come back before it is resubmitted     router/config.py: reattach_grace_s
     5.0  blocks that a lost attempt holds               pdmesh/worker/config.py: lease_s
     2.0  a push that gets no hello                      kvtransfer/sender/push.py: HELLO_TIMEOUT_S
     3.0  queueing behind the other requests of the run  computed: at most 16 of 60 tokens, 3 to 8 ms a step, few at a time
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.environment.redis import RedisServer
from tests.simulation.mesh import Member, SimulatedMesh
from tests.simulation.scenario import Fault
from tests.simulation.world import SECOND, World

STALL_S = 1.2 + 2.0 + 1.0 + 2.0 + 5.0 + 2.0 + 3.0
RESTART_S = 0.2


@dataclass(eq=False)
class Waiting:
    """A request that waits for its next token, since `since_ns`."""

    name: str
    since_ns: int
    longest_s: float = 0.0


class StallWatch:
    """Measures how long requests wait without a token and without a change of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[Waiting, None] = {}

    def begin(self, name: str) -> Waiting:
        waiting = Waiting(name, self._world.now_ns)
        self._waiting[waiting] = None
        return waiting

    def progress(self, waiting: Waiting) -> None:
        """Count anew: a token came, or something changed."""
        waiting.longest_s = max(waiting.longest_s, (self._world.now_ns - waiting.since_ns) / SECOND)
        waiting.since_ns = self._world.now_ns

    def end(self, waiting: Waiting) -> float:
        """Return the longest wait of a request that is over."""
        self.progress(waiting)
        self._waiting.pop(waiting, None)
        return waiting.longest_s

    def changed(self) -> None:
        """A fault begins or ends: whatever waits may have been struck by it."""
        for waiting in self._waiting:
            self.progress(waiting)


class Faults:
    """Strikes members of a mesh."""

    def __init__(self, mesh: SimulatedMesh, on_change: Callable[[], None]) -> None:
        self._mesh, self._network, self._on_change = mesh, mesh.network, on_change

    async def strike(self, fault: Fault) -> None:
        """Wait until it is time, do it, and undo it after its time."""
        await asyncio.sleep(fault.at_s)
        self._mesh.world.note("fault", fault.kind, *fault.targets)
        self._on_change()
        if fault.kind in ("kill", "power loss"):
            await self._stop(fault)
        elif fault.kind in ("cut", "cut both", "slow link", "narrow link", "sever", "drop"):
            await self._strike_link(fault)
        else:
            await self._strike_process(fault)
        self._on_change()

    async def _stop(self, fault: Fault) -> None:
        members = [self._member(name) for name in fault.targets]
        for member in members:
            self._mesh.kill(member, loses_power=fault.kind == "power loss")
        await asyncio.sleep(fault.for_s + RESTART_S)
        for member in members:
            if not member.is_up:
                self._mesh.start(member)

    async def _strike_link(self, fault: Fault) -> None:
        source, target = fault.targets
        network = self._network
        if fault.kind == "sever":
            network.sever(source, target)
        elif fault.kind == "drop":
            network.drop(source, target)
        elif fault.kind in ("cut", "cut both"):
            pairs = [(source, target)] + [(target, source)] * (fault.kind == "cut both")
            for pair in pairs:
                network.cut(*pair)
            await asyncio.sleep(fault.for_s)
            for pair in pairs:
                network.heal(*pair)
        else:
            change, amount = (
                (network.slow, fault.amount * SECOND) if fault.kind == "slow link" else (network.narrow, SECOND / fault.amount)
            )
            change(source, target, round(amount))
            await asyncio.sleep(fault.for_s)
            change(source, target, 0)

    async def _strike_process(self, fault: Fault) -> None:
        if fault.kind == "sever transfer":
            self._network.sever_at_segment(fault.targets[0], round(fault.amount))
            return
        process = self._member(fault.targets[0]).process
        if process is None:
            return
        if fault.kind == "freeze":
            process.freeze()
            self._network.froze(process)
            await asyncio.sleep(fault.for_s)
            process.resume()
        elif fault.kind == "slow process":
            process.slowness = fault.amount
            await asyncio.sleep(fault.for_s)
            process.slowness = 1.0
        elif fault.kind == "wall clock jump":
            process.wall_skew_ns += round(fault.amount * SECOND)
        elif fault.kind == "late redis" and self._mesh.redis_server is not None:
            server: RedisServer = self._mesh.redis_server
            server.delay_s = fault.amount
            await asyncio.sleep(fault.for_s)
            server.delay_s = 0.0

    def _member(self, name: str) -> Member:
        return next(member for member in self._mesh.members() if member.name == name)
