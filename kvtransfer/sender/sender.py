"""The sending end of transfers: `Sender` pushes the KV of one request into a reservation on another worker."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import grpc

from kvtransfer.errors import FrameError, NoAnswer, PushFailed, TransferRefused, TransportUnavailable, push_failed
from kvtransfer.manifest import (
    PROTOCOL_VERSION,
    TARGET_PART_BYTES,
    KVMemory,
    check_layout,
    check_memory,
    refuse,
)
from kvtransfer.native.library import prepare
from kvtransfer.sender.push import Push, PushConnection, PushJob, PushResult
from kvtransfer.sender.send_queue import Ending, FirstTokensDrawn, NothingToDecode, Pipeline
from kvtransfer.staging import StagedMemory
from kvtransfer.transports.base import Outgoing, Transport
from kvtransfer.transports.common import shown_by
from kvtransfer.transports.registry import transports_with
from pdmesh.runtime import failpoints
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import common_pb2, transfer_pb2

# Endpoints that did not answer recently are tried last, so that not every push waits for a port that drops packets


REMEMBER_S = 10.0


class Silent:
    """Remember the endpoints that did not answer one sender. They are tried after the others and never ruled out; an endpoint
    with another epoch counts as a new one."""

    def __init__(self, remember_s: float = REMEMBER_S) -> None:
        self._remember_s = remember_s
        self._since: dict[tuple[str, str, int], float] = {}

    def note(self, endpoint: common_pb2.TransferEndpoint, epoch: int) -> None:
        """Record that the endpoint did not answer just now."""
        now = time.monotonic()
        self._since = {key: since for key, since in self._since.items() if now - since < self._remember_s}
        self._since[endpoint.transport, endpoint.address, epoch] = now

    def holds(self, endpoint: common_pb2.TransferEndpoint, epoch: int) -> bool:
        """Return whether the endpoint failed to answer within the last `remember_s` seconds."""
        since = self._since.get((endpoint.transport, endpoint.address, epoch))
        return since is not None and time.monotonic() - since < self._remember_s


# The size of the parts of a push


def part_bytes_over(transport: Transport, memory: KVMemory, wanted: int | None) -> int:
    """Return the largest size of a part out of `memory`. `wanted` None: what suits the transport. A part of a staged pool fits
    into a piece, unless the receiver's device reads the pool."""
    shown, most = shown_by(memory), transport.max_shown_bytes
    if shown is not None and most is not None:
        return min(shown.part_bytes if wanted is None else wanted, most)
    wanted = TARGET_PART_BYTES if wanted is None else wanted
    return min(wanted, memory.part_bytes) if isinstance(memory, StagedMemory) else wanted


__all__ = ["PushFailed", "PushJob", "PushResult", "Sender"]

NUM_THREADS = 4
NUM_CONNECTIONS = 2  # for each push, where several connections are faster
BYTES_FOR_A_CONNECTION = 8 << 20
ASSUMED_BYTES_PER_S = 2e9
MIN_BYTES_TO_LEARN = 1 << 20

logger = logging.getLogger(__name__)


class Sender:
    """Push KV out of `memory`. identity, layout and epoch are this worker's. reply_timeout_s bounds every wait for a receiver
    that is silent: one whose event loop runs says so while its engine makes it wait.
    part_bytes is the largest size of a part; None: what suits the transport. tls encrypts what crosses hosts;
    with secret both ends prove that they are of one mesh.

    Raises ValueError for memory that does not have the shape of identity and layout.
    """

    def __init__(
        self,
        memory: KVMemory,
        identity: common_pb2.Identity,
        layout: common_pb2.KVLayout,
        epoch: int,
        *,
        reply_timeout_s: float = 5.0,
        part_bytes: int | None = None,
        num_connections: int = NUM_CONNECTIONS,
        tls: Tls | None = None,
        secret: MeshSecret | None = None,
    ) -> None:
        check_memory(memory, identity, layout)
        self._memory = memory
        self._identity = identity
        self._layout = layout
        self._epoch = epoch
        self._reply_timeout_s = reply_timeout_s
        self._part_bytes = part_bytes
        self._num_connections = num_connections
        self._transports = transports_with(tls, secret)
        self._bytes_per_s: dict[str, float] = {}
        self._silent = Silent()
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-send")
        self._executor.submit(prepare)  # until it is ready, Python does the same work
        self._opened: set[Outgoing] = set()
        self._num_opening = 0
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._closed = False

    async def push(self, job: PushJob, *, timeout_s: float) -> PushResult:
        """Send the KV that the decode worker lacks as the prefill makes it final, then commit, or release the reservation if
        nothing is left to decode. Raises PushFailed; on cancellation the connections are closed before it returns.

        `timeout_s` bounds the push from the end of the prefill on; before, each wait for the receiver is bounded.
        job.source_block_ids must stay pinned until this returns or raises.
        """
        started_ns = time.monotonic_ns()
        with _as_push_failed():
            pipeline = self._pipeline(job)
            async with self._limited(job, timeout_s), self._open_push(job, pipeline) as push:
                num_exposed_bytes = await push.send_parts(job, self._bytes_per_s.get(push.transport, ASSUMED_BYTES_PER_S))
                ending = await push.ending(job)
                await self._end(push, pipeline, job, ending)
                ended_ns = time.monotonic_ns()  # closing the connections does not count
                self._learn(push)
        return PushResult(
            transport=push.transport,
            num_bytes=push.num_bytes,
            num_exposed_bytes=num_exposed_bytes,
            num_parts=pipeline.num_parts,
            started_ns=started_ns,
            ended_ns=ended_ns,
            committed=isinstance(ending, FirstTokensDrawn),
        )

    async def _end(self, push: Push, pipeline: Pipeline, job: PushJob, ending: Ending) -> None:
        if isinstance(ending, NothingToDecode):
            await push.first.abort(finished=True, reason=ending.reason)
            return
        await failpoints.hit_async("push.before_commit")
        await push.first.commit(pipeline.num_parts, job.num_tokens, ending.choices, is_exact=ending.is_exact)
        await failpoints.hit_async("push.committed")

    @asynccontextmanager
    async def _limited(self, job: PushJob, timeout_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError `timeout_s` after the end of the prefill."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s if job.feed.ending else None) as limit:
            job.feed.on_end = lambda: limit.reschedule(loop.time() + timeout_s)
            try:
                yield
            finally:
                job.feed.on_end = None

    def _learn(self, push: Push) -> None:
        """Update the throughput of the transport, except from small pushes, which say little about it."""
        if push.num_bytes >= MIN_BYTES_TO_LEARN and push.busy_s > 0:
            before = self._bytes_per_s.get(push.transport)
            now = push.num_bytes / push.busy_s
            self._bytes_per_s[push.transport] = now if before is None else 0.7 * before + 0.3 * now

    async def close(self) -> None:
        """End running pushes (they raise PushFailed) and wait for all threads; idempotent."""
        self._closed = True
        for outgoing in self._opened:
            outgoing.stream.interrupt()
        await self._all_closed.wait()
        self._executor.shutdown()
        for transport in self._transports.values():
            transport.close()

    def _pipeline(self, job: PushJob) -> Pipeline:
        """Return the pipeline that cuts `job` into parts. Raises TransferRefused naming the field at fault."""
        check_layout(self._identity, self._layout, job.reservation.layout)
        num_blocks = -(-job.num_tokens // self._layout.block_size)
        known = num_blocks if job.feed.ending is not None else job.feed.ready.num_blocks
        if not known <= len(job.source_block_ids) <= num_blocks:
            raise refuse("source_block_ids", f"{len(job.source_block_ids)} blocks; {job.num_tokens} tokens need {num_blocks}")
        cached = job.reservation.num_cached_tokens
        if cached % job.reservation.layout.block_size or cached >= job.num_tokens:
            raise refuse("reservation.num_cached_tokens", f"{cached}: it must be whole blocks and less than {job.num_tokens}")
        if not all(0 <= block_id < self._memory.num_blocks for block_id in job.source_block_ids):
            raise refuse("source_block_ids", f"an id is outside the pool of {self._memory.num_blocks} blocks")
        memory = self._memory
        first_block = cached // self._layout.block_size  # the decode worker may have some of its tokens already
        return Pipeline(memory.num_layers, first_block, num_blocks, memory.bytes_per_layer_block)

    @asynccontextmanager
    async def _open_push(self, job: PushJob, pipeline: Pipeline) -> AsyncIterator[Push]:
        """Open the connections of a push, and close them in any case."""
        opened: list[PushConnection] = []
        try:
            endpoint = await self._connect(job, opened)
            pipeline.target_bytes = part_bytes_over(self._transports[endpoint.transport], self._memory, self._part_bytes)
            lease_s = job.reservation.lease_ms / 1000 or math.inf
            for connection in opened:
                connection.on_part = job.on_part
            try:
                yield Push(opened, pipeline, self._memory, lease_s)
            except PushFailed as error:
                if error.code is grpc.StatusCode.UNIMPLEMENTED:  # the next attempt takes another transport
                    self._silent.note(endpoint, job.reservation.epoch)
                raise
        finally:
            try:
                for connection in opened:
                    await connection.stop()
            finally:
                await self._close(*(connection.outgoing for connection in opened))

    async def _connect(self, job: PushJob, opened: list[PushConnection]) -> common_pb2.TransferEndpoint:
        """Connect over the best transport that works and return its endpoint. Raises PushFailed with the failure of each
        transport."""
        reasons = []
        epoch = job.reservation.epoch
        candidates = sorted(self._candidates(job.reservation), key=lambda pair: self._silent.holds(pair[1], epoch))
        for transport, endpoint in candidates:
            hello = self._hello(job.reservation)
            try:
                opened.append(await self._open(transport, endpoint, hello))
            except TransportUnavailable as error:
                logger.info("%s: %s", job.reservation.reservation_id, error)
                reasons.append(str(error))
                continue
            await self._open_more(transport, endpoint, hello, job, opened)
            return endpoint
        offered = ", ".join(endpoint.transport for endpoint in job.reservation.endpoints) or "nothing"
        why = "; ".join(reasons) or f"no transport that both ends offer: decode offers {offered}"
        raise push_failed(grpc.StatusCode.UNAVAILABLE, why)

    async def _open_more(
        self,
        transport: Transport,
        endpoint: common_pb2.TransferEndpoint,
        hello: transfer_pb2.TransferHello,
        job: PushJob,
        opened: list[PushConnection],
    ) -> None:
        """Open one connection for each BYTES_FOR_A_CONNECTION, where several connections are faster."""
        num_blocks = len(job.source_block_ids) - job.reservation.num_cached_tokens // self._layout.block_size
        num_bytes = num_blocks * 2 * self._memory.num_layers * self._memory.bytes_per_layer_block
        wanted = min(self._num_connections if transport.gains_by_connections else 1, num_bytes // BYTES_FOR_A_CONNECTION)
        for index in range(1, wanted):
            hello.connection = index
            try:
                opened.append(await self._open(transport, endpoint, hello))
            except TransportUnavailable as error:  # the first connection can carry everything
                logger.info("%s: no more connections: %s", hello.reservation_id, error)
                return

    async def _open(
        self, transport: Transport, endpoint: common_pb2.TransferEndpoint, hello: transfer_pb2.TransferHello
    ) -> PushConnection:
        self._check_open()
        self._num_opening += 1
        self._all_closed.clear()
        try:
            outgoing = await transport.connect(endpoint, self._memory, self._executor, self._reply_timeout_s)
            self._opened.add(outgoing)
        except TransportUnavailable:
            self._silent.note(endpoint, hello.epoch)
            raise
        finally:
            self._num_opening -= 1
            self._note_closed()
        try:
            self._check_open()  # the sender may have been closed meanwhile
            if hello.connection == 0:
                await failpoints.hit_async("push.hello")
            connection = PushConnection(outgoing, self._memory, transport.name, self._reply_timeout_s)
            await connection.hello(hello)
        except BaseException as error:
            if isinstance(error, NoAnswer):
                self._silent.note(endpoint, hello.epoch)
            await self._close(outgoing)
            raise
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise push_failed(grpc.StatusCode.UNAVAILABLE, "the sender is closed")

    def _candidates(self, reservation: common_pb2.Reservation) -> Iterator[tuple[Transport, common_pb2.TransferEndpoint]]:
        """Yield endpoints that this host can reach, best transport first."""
        for name, transport in self._transports.items():
            for endpoint in reservation.endpoints:
                if endpoint.transport == name and transport.sends(self._memory) and transport.reaches(endpoint):
                    yield transport, endpoint

    def _hello(self, reservation: common_pb2.Reservation) -> transfer_pb2.TransferHello:
        return transfer_pb2.TransferHello(
            protocol_version=PROTOCOL_VERSION,
            reservation_id=reservation.reservation_id,
            epoch=reservation.epoch,
            attempt=reservation.attempt,
            token=reservation.token,
            identity=self._identity,
            layout=self._layout,
            sender_epoch=self._epoch,
            push_id=secrets.token_bytes(16),
            reads_alive=True,
        )

    async def _close(self, *connections: Outgoing) -> None:
        for outgoing in connections:
            outgoing.stream.close()
        try:
            for outgoing in connections:
                await outgoing.stream.wait_closed()
        finally:
            self._opened.difference_update(connections)
            self._note_closed()

    def _note_closed(self) -> None:
        if not self._opened and not self._num_opening:
            self._all_closed.set()


@contextmanager
def _as_push_failed() -> Iterator[None]:
    """Turn every error that can stop a push into PushFailed; cancellation stays cancellation."""
    try:
        yield
    except PushFailed:
        raise
    except TransferRefused as error:
        raise push_failed(error.code, error.message) from error
    except TimeoutError as error:
        raise push_failed(grpc.StatusCode.DEADLINE_EXCEEDED, "the receiver did not answer in time") from error
    except (OSError, FrameError, failpoints.FailpointError) as error:
        raise push_failed(grpc.StatusCode.UNAVAILABLE, f"the connection broke: {error or type(error).__name__}") from error
