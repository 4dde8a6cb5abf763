"""Whatever network, clock and router do to a hand-off: what is committed is right, and nobody writes into another's blocks.

A state machine over two real endpoints with a hostile network between them. Blocks that were given away are painted; the paint
must stay until they are granted to somebody else, however late a former writer wakes up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.errors import PushFailed
from kvtransfer.manifest import new_token
from kvtransfer.reservation import Cancelled, Mode, NewAttempt, State, reserved, transition
from kvtransfer.sender import push as sender_push
from kvtransfer.sender import sender
from kvtransfer.sender.push import PushJob, PushResult
from kvtransfer.sender.send_queue import FirstTokensDrawn, KVReadiness, Ready
from tests.kvtransfer.endpoints import CHOICES, Held, World, nothing_left, until
from tests.kvtransfer.hostile_network import Harm, HostileNetwork, Strike
from tests.support.nixl import NEEDS_NIXL

LAYERS, BLOCKS, IDLE_S = 3, 24, 0.25
PUSH_BYTES = BLOCKS * LAYERS * 2 * 512

strikes = st.lists(
    st.builds(
        Strike,
        harm=st.sampled_from(list(Harm)),
        at=st.integers(0, PUSH_BYTES // 2) | st.integers(0, 600),
        connection=st.integers(0, 2),
        is_backward=st.booleans(),
    ),
    max_size=3,
)


async def end(job: PushJob) -> None:
    """On the loop, as an engine's events come."""
    job.feed.end(FirstTokensDrawn(CHOICES))


class Adversary(RuleBasedStateMachine):
    """At most one push at a time for each reservation; pushes go on while other rules are at work."""

    transport = "tcp"

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sender, "BYTES_FOR_A_CONNECTION", 1 << 12)
        patch.setattr(sender_push, "ALIVE_S", IDLE_S / 4)
        self.loop = asyncio.new_event_loop()
        self.left = nothing_left()
        self.left.__enter__()
        self.world = World(self.transport, num_blocks=BLOCKS, part_bytes=3000, idle_timeout_s=IDLE_S)
        self.world.sender = self.world.make_sender(part_bytes=3000, reply_timeout_s=IDLE_S, num_connections=3)
        self.run(self.world.receiver.start())
        endpoint = self.world.receiver.endpoints()[0]
        self.network = HostileNetwork(int(endpoint.address.rpartition(":")[2]))
        self.address = self.run(self.network.start())
        self.pushes: dict[str, tuple[asyncio.Task[PushResult], PushJob]] = {}
        self.free = list(range(self.world.target.num_blocks))
        self.paint: dict[int, bytes] = {}
        self.committed: dict[str, PushJob] = {}
        self.num_names = 0

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def names(self, *states: State) -> list[str]:
        return [name for name, held in self.world.delegate.held.items() if held.state.state in states]

    @precondition(lambda self: len(self.free) >= 4)
    @rule(data=st.data(), num_blocks=st.integers(2, 8))
    def reserve(self, data: st.DataObject, num_blocks: int) -> None:
        ids = data.draw(st.permutations(self.free))[: min(num_blocks, len(self.free))]
        first_block = data.draw(st.integers(0, len(ids) - 1))
        self.free = [block for block in self.free if block not in ids]
        for block in ids:
            self.paint.pop(block, None)
        self.num_names += 1
        state = reserved(1, Mode.REMOTE, time.monotonic(), 5.0)
        self.world.delegate.held[f"r{self.num_names}"] = Held(state, new_token(), tuple(ids), first_block, len(ids) * 16)

    @precondition(lambda self: self.idle_names())
    @rule(data=st.data(), harms=strikes, is_slow=st.booleans())
    def push(self, data: st.DataObject, harms: list[Strike], is_slow: bool) -> None:
        """Its prefill has ended, or goes on for a while."""
        name = data.draw(st.sampled_from(self.idle_names()))
        held = self.world.delegate.held[name]
        first = data.draw(st.integers(0, BLOCKS - len(held.block_ids)))
        reservation = self.world.reservation(name)
        reservation.endpoints[0].address = self.address
        ids, feed, steps = tuple(range(first, first + len(held.block_ids))), KVReadiness(), iter(range(1 << 30))
        job = PushJob(reservation, ids, held.num_tokens, feed, lambda: next(steps))
        self.network.plan(harms)
        feed.advance(Ready(0, len(ids), 1))
        self.pushes[name] = (self.loop.create_task(self.world.sender.push(job, timeout_s=2)), job)
        if not is_slow:
            self.finish_prefill(name)

    def idle_names(self) -> list[str]:
        return [name for name in self.names(State.RESERVED) if name not in self.pushes]

    def finish_prefill(self, name: str) -> None:
        _, job = self.pushes[name]
        count = len(job.source_block_ids)
        job.feed.advance(Ready(count, count, LAYERS))
        if job.feed.ending is None:
            self.run(end(job))

    @rule(ms=st.integers(0, 30))
    def time_passes(self, ms: int) -> None:
        self.run(asyncio.sleep(ms / 1000))

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def end_push(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pushes)))
        self.finish_prefill(name)
        self.join(name)

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def cancel_push(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pushes)))
        self.pushes[name][0].cancel()
        self.join(name)

    @precondition(lambda self: self.names(State.RESERVED, State.RECEIVING))
    @rule(data=st.data())
    def new_attempt(self, data: st.DataObject) -> None:
        """The router tries again, whatever the former attempt is busy with."""
        held = self.world.delegate.held[data.draw(st.sampled_from(self.names(State.RESERVED, State.RECEIVING)))]
        held.state = transition(held.state, NewAttempt(held.state.attempt + 1, Mode.REMOTE), time.monotonic())

    @precondition(lambda self: self.names(State.RESERVED, State.RECEIVING, State.COMMITTED))
    @rule(data=st.data())
    def give_away(self, data: st.DataObject) -> None:
        """Released: fenced, quiesced, and the blocks belong to somebody else from then on."""
        name = data.draw(st.sampled_from(self.names(State.RESERVED, State.RECEIVING, State.COMMITTED)))
        held = self.world.delegate.held[name]
        held.state = transition(held.state, Cancelled(), time.monotonic())
        self.run(self.world.receiver.quiesce(name))
        for block in held.block_ids:
            content = (b"%d;" % block) * 4000
            self.paint[block] = content[: LAYERS * 2 * 512]
            for layer in range(LAYERS):
                for kv in (0, 1):
                    begin = (layer * 2 + kv) * 512
                    self.world.target.block_view(layer, kv, block)[:] = self.paint[block][begin : begin + 512]
        self.free += held.block_ids

    def join(self, name: str) -> None:
        task, job = self.pushes.pop(name)
        [outcome] = self.run(asyncio.gather(task, return_exceptions=True))
        assert isinstance(outcome, PushResult | PushFailed | asyncio.CancelledError), outcome
        held = self.world.delegate.held[name]
        if isinstance(outcome, PushResult):
            assert held.state.state in (State.COMMITTED, State.RELEASED)
        if held.state.state is State.COMMITTED:
            self.committed[name] = job

    @invariant()
    def what_was_committed_is_right(self) -> None:
        for name, job in self.committed.items():
            held = self.world.delegate.held[name]
            if held.state.state is State.COMMITTED:
                self.check_content(held, job)

    def check_content(self, held: Held, job: PushJob) -> None:
        for index in range(held.first_block, len(held.block_ids)):
            source = self.world.source.block_bytes(job.source_block_ids[index])
            assert self.world.target.block_bytes(held.block_ids[index]) == source, f"block {index} was committed wrong"

    @invariant()
    def paint_stays(self) -> None:
        for block, content in self.paint.items():
            assert self.world.target.block_bytes(block) == content, f"somebody wrote into block {block}, which was given away"

    def teardown(self) -> None:
        for name in sorted(self.pushes):
            self.finish_prefill(name)
            self.join(name)
        self.paint_stays()
        self.what_was_committed_is_right()
        self.run(until(lambda: self.world.receiver.num_connections == 0, "all connections end"))
        assert not self.names(State.RECEIVING), "an attempt has neither failed nor been committed"
        self.run(self.network.stop())
        self.run(self.world.sender.close())
        self.run(self.world.receiver.stop())
        self.world.source.close()
        self.world.target.close()
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()
        self.left.__exit__(None, None, None)
        self.stack.close()


class AdversaryOfNixl(Adversary):
    """Here the network carries the conversation; what it is about takes another way."""

    transport = "nixl"


FEW = settings(max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
Adversary.TestCase.settings = AdversaryOfNixl.TestCase.settings = FEW
test_adversary = Adversary.TestCase
test_adversary_of_nixl = NEEDS_NIXL(AdversaryOfNixl.TestCase)
