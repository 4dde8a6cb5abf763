"""Workers that answer at once, to measure what is left: a router's own time. `python -m benchmarks.router.stub_worker`.

One process, two workers on two ports: a decode worker with its DecodeService and a prefill worker with its PrefillService. Both
are real gRPC on loopback; the "hand-off" between them is a call within the process. A sequence gets its first token as soon as it
starts, whenever that is, and one more with each step; all tokens of a step share one frame, as a real worker's do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    mesh_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

MODEL = "stub"
TOKEN_ID = 65
MAX_CONTEXT = 1 << 20
MANY = 1_000_000
"""Blocks and sequences: these workers are never full."""


@dataclass(eq=False)
class Sequence:
    """A request here: the tokens that went out, and how many there are to be."""

    request_id: str
    max_tokens: int
    attempt: int
    num_sent: int = 0


class StubDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Requests of one router. `step_s`: the pause between two steps; `hold_after`: sequences fall silent after so many tokens."""

    def __init__(self, epoch: int, step_s: float, hold_after: int | None) -> None:
        self._epoch = epoch
        self._step_s = step_s
        self._hold_after = hold_after
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._frame = decode_pb2.Frame(epoch=epoch)
        self._news = asyncio.Event()
        self._has_work = asyncio.Event()

    async def Submit(self, request: decode_pb2.SubmitRequest, context: object) -> decode_pb2.SubmitResponse:
        """Always room."""
        request_id = request.request_id
        self._waiting[request_id] = Sequence(request_id, request.request.sampling.max_tokens, request.attempt)
        if request.mode == mesh_pb2.PREFILL_MODE_LOCAL:
            self.start(request_id)
        reservation = common_pb2.Reservation(
            reservation_id=request_id,
            epoch=self._epoch,
            attempt=request.attempt,
            lease_ms=5000,
            token=b"stub",
            endpoints=[common_pb2.TransferEndpoint(transport="tcp", address="127.0.0.1:1")],
        )
        return decode_pb2.SubmitResponse(reservation=reservation)

    async def Cancel(self, request: decode_pb2.CancelRequest, context: object) -> decode_pb2.CancelResponse:
        """Forget it."""
        held = self._waiting.pop(request.request_id, None) or self._running.pop(request.request_id, None)
        return decode_pb2.CancelResponse(found=held is not None)

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.AttachRequest], context: object
    ) -> AsyncIterator[decode_pb2.Frame]:
        """One frame for what has gathered since the last, and heartbeats."""
        first = await anext(request_iterator)
        drain = asyncio.create_task(_drain(request_iterator))
        try:
            while True:
                frame, self._frame = self._frame, decode_pb2.Frame(epoch=self._epoch)
                self._news.clear()
                yield frame
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(first.period_ms / 1000):
                        await self._news.wait()
        finally:
            drain.cancel()

    async def run(self) -> None:
        """Step for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self._has_work.wait()
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self._step()

    def start(self, request_id: str) -> None:
        """The prompt is there: the first token leaves at once."""
        sequence = self._waiting.pop(request_id)
        event = self._frame.events.add()
        event.request_id, event.attempt = request_id, sequence.attempt
        event.kind = decode_pb2.REQUEST_EVENT_KIND_STARTED
        self._emit(sequence)
        if sequence.num_sent < min(sequence.max_tokens, self._hold_after or sequence.max_tokens):
            self._running[request_id] = sequence
            self._has_work.set()

    def forget(self, request_id: str) -> None:
        """It ended with its first token."""
        self._waiting.pop(request_id, None)

    def _step(self) -> None:
        for sequence in list(self._running.values()):
            self._emit(sequence)
            if sequence.num_sent in (sequence.max_tokens, self._hold_after):
                del self._running[sequence.request_id]
        if not self._running:
            self._has_work.clear()

    def _emit(self, sequence: Sequence) -> None:
        output = self._frame.outputs.add()
        output.request_id, output.first_index = sequence.request_id, sequence.num_sent
        output.token_ids.append(TOKEN_ID)
        sequence.num_sent += 1
        if sequence.num_sent == sequence.max_tokens:
            output.finish_reason = common_pb2.FINISH_REASON_LENGTH
        self._news.set()


@dataclass
class StubPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """The first token, then the news that the KV has arrived."""

    Embed = None  # type: ignore[assignment]
    decode: StubDecode

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: object) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Never fails."""
        token = prefill_pb2.FirstToken(token_id=TOKEN_ID)
        if request.request.sampling.max_tokens == 1:
            token.finish_reason = common_pb2.FINISH_REASON_LENGTH
        yield prefill_pb2.PrefillEvent(first_tokens=prefill_pb2.FirstTokens(tokens=[token]))
        if token.finish_reason:
            self.decode.forget(request.request_id)
            yield _outcome(prefill_pb2.HANDOFF_STATUS_FINISHED)
            return
        self.decode.start(request.request_id)
        yield _outcome(prefill_pb2.HANDOFF_STATUS_COMMITTED)


@dataclass
class StubControl(worker_pb2_grpc.WorkerControlServicer):
    """Who the worker is, and that it is idle."""

    name: str
    role: worker_pb2.Role.ValueType
    epoch: int = field(default_factory=lambda: secrets.randbits(62) + 1)
    address: str = ""

    LoadAdapter = UnloadAdapter = ListAdapters = ReleaseRetained = SendBlocks = WatchBlocks = WarmPrefix = None  # type: ignore[assignment]
    UpdateWeights = SetServing = SendWeights = ReadWeights = None  # type: ignore[assignment]

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: object) -> worker_pb2.WorkerInfo:
        """The same for both, but for name and role."""
        return worker_pb2.WorkerInfo(
            worker_id=self.name,
            epoch=self.epoch,
            address=self.address,
            roles=[self.role],
            identity=common_pb2.Identity(model=MODEL, weights_hash="w", num_layers=2, numeric_mode="stub", protocol_version=1),
            layout=common_pb2.KVLayout(block_size=16, kv_dtype="float32", tensor_parallel_size=1, arrangement="plain"),
            transports=["tcp"],
            max_context=MAX_CONTEXT,
            max_num_seqs=MANY,
            num_blocks=MANY,
        )

    async def Watch(self, request: worker_pb2.WatchRequest, context: object) -> AsyncIterator[worker_pb2.LoadReport]:
        """A report every period."""
        while True:
            yield worker_pb2.LoadReport(
                worker_id=self.name,
                epoch=self.epoch,
                roles=[self.role],
                num_free_blocks=MANY,
                num_total_blocks=MANY,
                max_num_seqs=MANY,
            )
            await asyncio.sleep(request.period_ms / 1000)

    SetRoles = None  # type: ignore[assignment]

    async def ListBlocks(self, request: worker_pb2.ListBlocksRequest, context: object) -> AsyncIterator[worker_pb2.BlockList]:
        """It caches nothing."""
        yield worker_pb2.BlockList(epoch=self.epoch, is_last=True)

    async def KeepTraces(self, request: worker_pb2.KeepTracesRequest, context: object) -> worker_pb2.KeepTracesResponse:
        """It has none."""
        return worker_pb2.KeepTracesResponse()


def _outcome(status: prefill_pb2.HandoffStatus.ValueType) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(outcome=prefill_pb2.HandoffOutcome(status=status, transport="tcp"))


async def _drain(requests: AsyncIterator[decode_pb2.AttachRequest]) -> None:
    async for _ in requests:
        pass


@asynccontextmanager
async def start_workers(step_s: float, hold_after: int | None) -> AsyncIterator[list[str]]:
    """Both run; their addresses, decode first."""
    servers = [GrpcServer("127.0.0.1", 0), GrpcServer("127.0.0.1", 0)]
    controls = [StubControl("decode", worker_pb2.ROLE_DECODE), StubControl("prefill", worker_pb2.ROLE_PREFILL)]
    decode = StubDecode(controls[0].epoch, step_s, hold_after)
    servers[0].register(decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode, "pdmesh.v1.DecodeService")
    servers[1].register(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, StubPrefill(decode), "pdmesh.v1.PrefillService")
    for server, control in zip(servers, controls, strict=True):
        server.register(worker_pb2_grpc.add_WorkerControlServicer_to_server, control, "pdmesh.v1.WorkerControl")
        control.address = f"127.0.0.1:{await server.start()}"
    stepping = asyncio.create_task(decode.run())
    try:
        yield [server.address for server in servers]
    finally:
        stepping.cancel()
        await asyncio.gather(*(server.drain(0.0) for server in servers))


async def main(step_s: float, hold_after: int | None) -> None:
    """Until it is killed."""
    async with start_workers(step_s, hold_after) as addresses:
        print(json.dumps({"ready": True, "address": ",".join(addresses)}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--hold-after", type=int)
    given = parser.parse_args()
    asyncio.run(main(given.step_s, given.hold_after))
