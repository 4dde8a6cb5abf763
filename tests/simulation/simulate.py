"""One run of a scenario, and what must be true during it and after it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Completed, Delta, GenerateOptions
from pdmesh.errors import MeshError
from tests.simulation import invariants, machine, oracle, tiers
from tests.simulation.engine import SimulatedEngine
from tests.simulation.environment import byte_stream
from tests.simulation.environment.faults import STALL_S, Faults, StallWatch
from tests.simulation.environment.network import Network
from tests.simulation.mesh import MODEL, Member, SimulatedMesh, install_hosts
from tests.simulation.profiles import BLOCK_SIZE, CALM, DEAD_S, DEATHS
from tests.simulation.rpc import server as rpc_server
from tests.simulation.scenario import Ask, Fault, Scenario
from tests.simulation.world import MILLISECOND, SECOND, World, current_process

LONGEST_REQUEST_S = 40.0
TIMEOUT_S = 60.0  # of each request: no run lasts so long
QUIET_S = 12.0
DROPPED_S = 40.0
"""How much longer a router keeps a client that nobody says is gone: its pings, KEEPALIVE_TIME_S and KEEPALIVE_TIMEOUT_S."""
QUIET_GRAIN_NS = 200 * MILLISECOND
"""Timers end together, at multiples of it, when all requests are over: heartbeats come in time, most ticks find nothing new."""
READY_S = 1.4


@dataclass
class Got:
    """What one request got."""

    ask: Ask
    tokens: dict[int, list[int]] = field(default_factory=dict)
    error: MeshError | None = None
    completed: Completed | None = None
    has_left: bool = False
    took_s: float = 0.0
    longest_gap_s: float = 0.0
    longest_stall_s: float = 0.0  # without a token, and without a fault that began or ended


@dataclass
class Outcome:
    """The end of a run."""

    seed: int
    violations: list[str]
    digest: int
    virtual_s: float
    num_events: int
    got: list[Got]


class Run:
    """A scenario in a world of its own."""

    def __init__(self, scenario: Scenario, *, log: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.world.log = [] if log else None
        self.network = Network(self.world)
        self.mesh = SimulatedMesh(self.world, self.network, scenario)
        self.stalls = StallWatch(self.world)
        self.faults = Faults(self.mesh, self.stalls.changed)
        self.violations: list[str] = []
        self.got: list[Got] = []

    def run(self) -> Outcome:
        """Run it to the end."""
        machine.enter(self.world)
        rpc_server.install(lambda: self.network)
        byte_stream.install(lambda: self.network)
        install_hosts()
        tiers.install(self.mesh.kv_disk_of)
        invariants.install(self._fail)
        self.world.loop.set_exception_handler(self._on_exception)
        try:
            self.world.run(self.main())
        finally:
            machine.enter(None)
        return Outcome(
            self.scenario.seed, self.violations, self.world.digest, self.world.now_ns / SECOND, self.world.num_events, self.got
        )

    async def main(self) -> None:
        """Do what the scenario says, and look at what is left."""
        scenario = self.scenario
        sizes = {
            "num_blocks": scenario.num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": scenario.max_num_seqs,
            "max_num_batched_tokens": 64,
        }
        for name in scenario.decodes:
            self.mesh.add_worker(name, ("decode",), **sizes)
        for name in scenario.prefills:
            self.mesh.add_worker(name, ("prefill",), **sizes)
        for name in scenario.boths:
            self.mesh.add_worker(name, ("prefill", "decode"), **sizes)
        for name in scenario.routers:
            self.mesh.add_router(name)
        for member in self.mesh.members():
            self.mesh.start(member)
        tasks = [asyncio.ensure_future(self.faults.strike(fault)) for fault in scenario.faults]
        tasks += [asyncio.ensure_future(self._ask(ask)) for ask in scenario.asks]
        if scenario.profile == DEATHS:
            tasks += [asyncio.ensure_future(self._check_orphans(fault)) for fault in scenario.faults]
        done, late = await asyncio.wait(tasks, timeout=scenario.ends_s + LONGEST_REQUEST_S)
        for task in done:
            task.result()
        if late:
            self._fail(f"{len(late)} requests have not ended")
        self.world.loop.grain_ns = QUIET_GRAIN_NS
        is_dropped = any(fault.kind == "drop" for fault in scenario.faults)
        await asyncio.sleep(QUIET_S + DROPPED_S if is_dropped else QUIET_S)
        self.check_quiet()
        self._check_answers()

    # Requests

    async def _ask(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s)
        got = Got(ask)
        self.got.append(got)
        process = self.world.process(ask.client)
        task = process.start(self._request(got))
        began = self.world.now_ns
        if self.is_calm and (over_s := ask.leaves_s or ask.cancels_s):
            asyncio.get_running_loop().call_later(over_s + invariants.RELEASED_S, self._check_released, ask)
        if ask.leaves_s is not None:
            await asyncio.wait([task], timeout=ask.leaves_s)
            if not task.done():
                got.has_left = True
                self.mesh.graveyard.append(set(process.tasks))
                process.kill()
                self.network.died(process)
                return
        await task
        got.took_s = (self.world.now_ns - began) / SECOND

    async def _request(self, got: Got) -> None:
        ask = got.ask
        options: GenerateOptions = {
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "temperature": ask.temperature,
            "n": ask.num_choices,
        }
        if self.is_calm:
            options["request_id"] = _request_id(ask)
        if ask.ignores_eos:
            options["ignore_eos"] = True
        if ask.mode is not None:
            options["mode"] = ask.mode
        addresses = [member.address for member in self.mesh.routers.values()]
        waiting = self.stalls.begin(f"{ask}")
        async with AsyncClient(addresses, retry_overload=True) as client:
            try:
                stream = client.generate_stream(list(ask.prompt), model=MODEL, timeout=TIMEOUT_S, **options)
                if ask.cancels_s is not None:
                    asyncio.get_running_loop().call_later(ask.cancels_s, stream.cancel)
                last = self.world.now_ns
                async for event in stream:
                    self.stalls.progress(waiting)
                    got.longest_gap_s = max(got.longest_gap_s, (self.world.now_ns - last) / SECOND)
                    self._take(got, event)
                    if ask.pause_s:
                        await asyncio.sleep(ask.pause_s)
                        self.stalls.progress(waiting)
                    last = self.world.now_ns
            except MeshError as error:
                got.error = error
            got.longest_stall_s = self.stalls.end(waiting)
            if ask.cancels_s is not None and self.is_calm:
                await asyncio.sleep(2 * invariants.RELEASED_S)  # a client that lives on: it is the cancellation that releases

    def _take(self, got: Got, event: object) -> None:
        if isinstance(event, Completed):
            got.completed = event
        if isinstance(event, Delta) and event.token_ids:
            tokens = got.tokens.setdefault(event.choice, [])
            if event.first_index != len(tokens):
                self._fail(f"{got.ask}: index {event.first_index} came after {len(tokens)} tokens")
            tokens += event.token_ids
            self.world.note("tokens", event.choice, event.first_index, event.token_ids)

    def _check_answers(self) -> None:
        for got in self.got:
            ask = got.ask
            for choice in range(ask.num_choices):
                right = oracle.answer(ask, choice)
                tokens = tuple(got.tokens.get(choice, ()))
                if tokens != right[: len(tokens)]:
                    self._fail(f"{ask} choice {choice}: got {tokens}, right is {right}")
                elif got.completed is not None and got.error is None and ask.cancels_s is None and tokens != right:
                    self._fail(f"{ask} choice {choice}: ended with {len(tokens)} of {len(right)} tokens")
            bound_s = _BOUNDS_S.get(self.scenario.profile, STALL_S)
            if self.scenario.is_spared and got.longest_stall_s > bound_s:
                self._fail(f"{ask}: no token for {got.longest_stall_s:.1f} s, longer than {bound_s:g} s")
            if got.completed is not None and (problem := invariants.repeated(self.scenario, got.completed)):
                self._fail(f"{ask}: {problem} without a cause")
            if got.error is not None and not self._may_fail(got):
                self._fail(f"{ask}: {type(got.error).__name__}: {got.error}")

    def _may_fail(self, got: Got) -> bool:
        if got.ask.cancels_s is not None:
            return True
        return not self.scenario.is_spared

    # What must be true

    @property
    def is_calm(self) -> bool:
        return self.scenario.profile == CALM

    def _check_released(self, ask: Ask) -> None:
        for held in invariants.held_requests(self.mesh.workers.values(), _request_id(ask)):
            self._fail(f"{held} {invariants.RELEASED_S:g} s after its client has cancelled it or left")

    async def _check_orphans(self, fault: Fault) -> None:
        """Look whether workers let go of what a router had that is dead for long."""
        await asyncio.sleep(fault.at_s + invariants.ORPHANED_S)
        if fault.for_s == DEAD_S and fault.targets[0] in self.mesh.routers:
            for held in invariants.orphans(self.mesh.workers.values(), fault.targets[0]):
                self._fail(f"{held} {invariants.ORPHANED_S:g} s after {fault.targets[0]} was gone")

    def check_quiet(self) -> None:
        """Fail for everything that a process holds when nothing is left to do."""
        for member in self.mesh.members():
            self._violations_of(member)
        whole = [connection for connection in self.network.connections if not connection.is_severed]
        if any(end.process.is_dead for connection in whole for end in connection.ends):
            self._fail("a connection to a dead process is left")

    def _violations_of(self, member: Member) -> None:
        for failure in member.failures:
            self._fail(f"{member.name} failed: {failure!r}")
        if member.worker is not None:
            composed = member.worker.engine
            assert isinstance(composed, SimulatedEngine)
            engine = composed.engine
            stats = engine.stats()
            busy = (stats.num_running, stats.num_waiting, stats.num_reserved, stats.num_held)
            if any(busy) or stats.num_free_blocks != stats.num_total_blocks:
                held = f"running, waiting, reserved, held are {busy}, {stats.num_free_blocks} blocks free"
                self._fail(f"{member.name} is not whole: {held}")
            engine.check_integrity()
            for problem in tiers.problems(member.worker.tiers):
                self._fail(f"{member.name}: {problem}")
            if len(member.worker.dispatcher):
                self._fail(f"{member.name} has {len(member.worker.dispatcher)} sinks left")
        if member.router is not None:
            admission = member.router.core.flow_control.admission
            for left_out in invariants.ejected_for_ever(member.router):
                self._fail(f"{member.name}: {left_out}")
            if admission.num_inflight or admission.num_queued or len(member.router.core.background):
                self._fail(f"{member.name} has {admission.num_inflight} requests in flight, {admission.num_queued} queued")

    def _on_exception(self, loop: object, context: dict[str, Any]) -> None:
        if self._is_of_the_dead():
            return
        self._fail(f"an exception was not handled: {context.get('message')}: {context.get('exception')!r}")

    def _is_of_the_dead(self) -> bool:
        process = current_process()
        return process is not None and process.is_dead

    def _fail(self, what: str) -> None:
        self.violations.append(what)
        self.world.note("VIOLATION", what)


_BOUNDS_S = {CALM: invariants.CALM_STALL_S, DEATHS: invariants.DEATH_STALL_S}


def _request_id(ask: Ask) -> str:
    """Return the id that the client of a calm run gives: no other begins as it does."""
    return f"calm-{ask.number:03}"
