"""A simulated router and worker that get the calls of an input, and what must be true of the answers and afterwards.

The world is the same for each input, on a virtual clock: an input that breaks something breaks it again. Import it only after
`prepare`, in a process that does nothing else: it has another clock, and another gRPC.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from kvtransfer import framing
from pdmesh.v1.transfer_pb2 import TransferChunk, TransferMessage
from tests.fuzzing.mesh_calls import CANCEL, FILL, NOT_OURS, ROUTER_METHODS, SAME_STREAM, WAIT, WORKER_METHODS, Step, steps_of
from tests.simulation.mesh import MODEL
from tests.simulation.rpc.server import Server
from tests.simulation.scenario import START_S, Scenario
from tests.simulation.simulate import QUIET_GRAIN_NS, Run

PATIENCE_S = 3.0
"""Of a call that no record cancels: streams have no end of their own."""
QUIET_S = 9.0
"""Longer than a lease, the grace of a router's streams, and the silence of a worker."""
NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""How a bug in a handler looks to its caller."""
WORKER, ROUTER = "w", "r"
OF_WORKER = {name.split(".")[-2] for name in WORKER_METHODS}
SIZES = {"num_blocks": 24, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64}
SCENARIO = Scenario(1, (), (), (WORKER,), (ROUTER,), num_blocks=24, max_num_seqs=4, asks=(), faults=(), is_spared=False)


class Broken(AssertionError):
    """An input did what no input may do."""


def run(methods: Sequence[str], data: bytes) -> None:
    """Send what an input says to a mesh of its own. Raises Broken for a call that fails as a bug does, and for what is left."""
    violations = _violations(list(steps_of(methods, data)))
    gc.collect()  # no destructor of one run works in the next
    if violations:
        raise Broken("; ".join(violations))


def _violations(steps: list[Step]) -> list[str]:
    calls = CallsRun(steps)
    if steps:
        calls.run()
    return calls.violations


class CallsRun(Run):
    """A run whose client is an input."""

    def __init__(self, steps: list[Step], *, log: bool = False) -> None:
        super().__init__(SCENARIO, log=log)
        self._steps = steps
        self._reservation: Any = None  # the last that a worker gave
        self._streams: dict[str, asyncio.Queue[Any]] = {}
        self._channels: dict[str, Any] = {}
        self.answered = Counter[str]()  # calls that were served, by method; streams by their first message

    async def main(self) -> None:
        """Start the mesh, send everything, and look at what is left."""
        self.mesh.add_worker(WORKER, ("prefill", "decode"), **SIZES)
        self.mesh.add_router(ROUTER)
        for member in self.mesh.members():
            self.mesh.start(member)
        await asyncio.sleep(START_S)
        self._check_methods()
        await self.world.process("client").start(self._send_all())
        self.world.loop.grain_ns = QUIET_GRAIN_NS
        await asyncio.sleep(QUIET_S)
        self.check_quiet()

    def _check_methods(self) -> None:
        """Fail for a method that a server has and no input can call."""
        for member, methods in ((self.mesh.workers[WORKER], WORKER_METHODS), (self.mesh.routers[ROUTER], ROUTER_METHODS)):
            server = self.network.listeners[member.address]
            assert isinstance(server, Server)
            for path in server._handlers.keys() - {f"/{'/'.join(name.rsplit('.', 1))}" for name in methods}:
                if not path.startswith(NOT_OURS):
                    self._fail(f"{member.name} serves {path}, which is not fuzzed")

    async def _send_all(self) -> None:
        members = {WORKER: self.mesh.workers[WORKER], ROUTER: self.mesh.routers[ROUTER]}
        self._channels = {name: grpc.aio.insecure_channel(member.address) for name, member in members.items()}
        tasks: list[asyncio.Task[None]] = []
        for step in self._steps:
            task = asyncio.ensure_future(self._send(step))
            tasks.append(task)
            if step.flags & WAIT:
                await asyncio.wait([task], timeout=PATIENCE_S)
            else:
                await asyncio.sleep(step.delay_s)
            if step.flags & CANCEL:
                task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for channel in self._channels.values():
            await channel.close()

    async def _send(self, step: Step) -> None:
        message = step.message
        if step.flags & FILL:
            fill(message, self._known())
        if isinstance(message, TransferMessage):
            message = TransferChunk(data=framing.encode(message))
        if step.flags & SAME_STREAM and step.path in self._streams:
            self._streams[step.path].put_nowait(message)
            return
        try:
            await self._call(step, message)
        except grpc.aio.AioRpcError as error:
            if error.code() in NEVER:
                self._fail(f"{step.path}: {error.code().name} {error.details()}")

    async def _call(self, step: Step, message: Any) -> None:
        owner = WORKER if step.method.containing_service.name in OF_WORKER else ROUTER
        channel, response_class = self._channels[owner], GetMessageClass(step.method.output_type)
        kinds = (channel.unary_unary, channel.unary_stream, channel.stream_stream)
        make = kinds[step.method.client_streaming + step.method.server_streaming]
        method = make(step.path, lambda message: message.SerializeToString(), response_class.FromString)
        call = method(self._requests(step, message) if step.method.client_streaming else message)
        try:
            if step.method.server_streaming:
                async for response in call:
                    self._heard(step, response)
            else:
                self._heard(step, await call)
        finally:
            call.cancel()

    async def _requests(self, step: Step, first: Any) -> AsyncIterator[Any]:
        queue = self._streams[step.path] = asyncio.Queue()
        yield first
        while True:
            yield await queue.get()

    def _heard(self, step: Step, response: Any) -> None:
        self.answered[step.path] += 1
        if response.DESCRIPTOR.name == "SubmitResponse" and response.HasField("reservation"):
            self._reservation = response.reservation

    def _known(self) -> dict[str, Any]:
        """Return what the sender of a right message would know, by the names of fields."""
        worker = self.mesh.workers[WORKER].worker
        assert worker is not None
        info = worker.info()
        known = {"epoch": info.epoch, "identity": info.identity, "model": MODEL, "model_name": MODEL}
        granted = self._reservation
        if granted is None:
            return known
        return {
            **known,
            "reservation": granted,
            **{name: getattr(granted, name) for name in ("reservation_id", "token", "layout")},
        }


def fill(message: Any, known: dict[str, Any]) -> None:
    """Put in what is known, in the message and in those that it has."""
    for name, field in message.DESCRIPTOR.fields_by_name.items():
        value = known.get(name)
        if field.is_repeated:
            continue
        if isinstance(value, type(getattr(message, name))):
            if field.message_type is None:
                setattr(message, name, value)
            else:
                getattr(message, name).CopyFrom(value)
        elif field.message_type is not None and message.HasField(name):
            fill(getattr(message, name), known)
