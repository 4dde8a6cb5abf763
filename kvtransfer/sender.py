"""The prefill worker's end: pushes the KV of one request into a reservation on a decode worker."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import grpc

from kvtransfer.compatibility import PROTOCOL_VERSION, check_layout, check_memory, refuse
from kvtransfer.errors import FrameError, PushFailed, TransferRefused, TransportUnavailable, push_failed
from kvtransfer.memory import KVMemory
from kvtransfer.outgoing import OutgoingSession
from kvtransfer.parts import TARGET_PART_BYTES, PartPlan, plan_parts
from kvtransfer.push import PushJob, PushResult
from kvtransfer.transports.base import Outgoing, Transport
from kvtransfer.transports.registry import TRANSPORTS
from protos.v1 import common_pb2, transfer_pb2
from runtime import failpoints

__all__ = ["PushFailed", "PushJob", "PushResult", "Sender"]

NUM_THREADS = 4

logger = logging.getLogger(__name__)


class Sender:
    """Pushes out of `memory`. identity, layout and epoch are this worker's. reply_timeout_s bounds every wait for a receiver.

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
        part_bytes: int = TARGET_PART_BYTES,
    ) -> None:
        check_memory(memory, identity, layout)
        self._memory = memory
        self._identity = identity
        self._layout = layout
        self._epoch = epoch
        self._reply_timeout_s = reply_timeout_s
        self._part_bytes = part_bytes
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-send")
        self._open: set[Outgoing] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._closed = False

    async def push(self, job: PushJob, *, timeout_s: float) -> PushResult:
        """Send what decode lacks and commit. Raises PushFailed; on cancellation the connection is closed before it returns.

        `timeout_s` bounds the whole push. job.source_block_ids must stay pinned until this returns or raises.
        """
        started_ns = time.monotonic_ns()
        with _as_push_failed():
            async with asyncio.timeout(timeout_s):
                plan = self._plan(job)
                async with self._session(job) as session:
                    num_bytes = await session.send_parts(plan, job.source_block_ids)
                    await failpoints.hit_async("push.before_commit")
                    await session.commit(len(plan.parts), job.num_tokens, job.choices)
                    await failpoints.hit_async("push.committed")
        return PushResult(session.transport, num_bytes, len(plan.parts), time.monotonic_ns() - started_ns)

    async def abort(self, job: PushJob, *, finished: bool, reason: str) -> None:
        """Tell decode that nothing will be pushed: `finished` releases the reservation, else this attempt has failed.

        Returns when the receiver has acted on it. Raises PushFailed if it could not be told: its lease will lapse.
        """
        with _as_push_failed():
            async with asyncio.timeout(self._reply_timeout_s), self._session(job) as session:
                await session.abort(finished=finished, reason=reason)

    async def close(self) -> None:
        """End running pushes (they raise PushFailed) and wait for all threads; idempotent."""
        self._closed = True
        for outgoing in self._open:
            outgoing.stream.interrupt()
        await self._all_closed.wait()
        self._executor.shutdown()

    def _plan(self, job: PushJob) -> PartPlan:
        """The parts of `job`. Raises TransferRefused naming what is wrong with it."""
        check_layout(self._layout, job.reservation.layout)
        num_blocks = -(-job.num_tokens // self._layout.block_size)
        if len(job.source_block_ids) != num_blocks:
            raise refuse("source_block_ids", f"{len(job.source_block_ids)} blocks; {job.num_tokens} tokens need {num_blocks}")
        cached = job.reservation.num_cached_tokens
        if cached % self._layout.block_size or cached >= job.num_tokens:
            raise refuse("reservation.num_cached_tokens", f"{cached}: it must be whole blocks and less than {job.num_tokens}")
        if not all(0 <= block_id < self._memory.num_blocks for block_id in job.source_block_ids):
            raise refuse("source_block_ids", f"an id is outside the pool of {self._memory.num_blocks} blocks")
        return plan_parts(
            self._memory.num_layers,
            job.first_block,
            num_blocks,
            self._memory.bytes_per_layer_block,
            target_bytes=self._part_bytes,
        )

    @asynccontextmanager
    async def _session(self, job: PushJob) -> AsyncIterator[OutgoingSession]:
        """A session that the receiver accepted, closed on every way out."""
        session = await self._connect(job)
        try:
            yield session
        finally:
            self._close(session.outgoing)

    async def _connect(self, job: PushJob) -> OutgoingSession:
        """Over the best transport that works. Raises PushFailed with what stood in the way of each."""
        reasons = []
        for transport, endpoint in self._candidates(job.reservation):
            try:
                return await self._open_session(transport, endpoint, job)
            except TransportUnavailable as error:
                logger.info("%s: %s", job.reservation.reservation_id, error)
                reasons.append(str(error))
        offered = ", ".join(endpoint.transport for endpoint in job.reservation.endpoints) or "nothing"
        why = "; ".join(reasons) or f"no transport that both ends offer: decode offers {offered}"
        raise push_failed(grpc.StatusCode.UNAVAILABLE, why)

    async def _open_session(self, transport: Transport, endpoint: common_pb2.TransferEndpoint, job: PushJob) -> OutgoingSession:
        outgoing = await transport.connect(endpoint, self._memory, self._executor, self._reply_timeout_s)
        self._open.add(outgoing)
        self._all_closed.clear()
        try:
            if self._closed:
                raise push_failed(grpc.StatusCode.UNAVAILABLE, "the sender is closed")
            await failpoints.hit_async("push.hello")
            session = OutgoingSession(outgoing, self._memory, transport.name)
            await session.hello(self._hello(job.reservation))
        except BaseException:
            self._close(outgoing)
            raise
        return session

    def _candidates(self, reservation: common_pb2.Reservation) -> Iterator[tuple[Transport, common_pb2.TransferEndpoint]]:
        """Endpoints that we can reach, best transport first."""
        for name, transport in TRANSPORTS.items():
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
        )

    def _close(self, outgoing: Outgoing) -> None:
        outgoing.stream.close()
        self._open.discard(outgoing)
        if not self._open:
            self._all_closed.set()


@contextmanager
def _as_push_failed() -> Iterator[None]:
    """Everything that can stop a push becomes PushFailed; cancellation stays cancellation."""
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
