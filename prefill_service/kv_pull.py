"""Fetches KV that another worker holds, where that is quicker than computing it: the way back from a decode worker.

    here ── SendBlocks(hashes of the blocks that are missing, a reservation of ours) ──► the holder: pins them
    here ◄── a push into that reservation, as a hand-off ─────────────────────────────── its sender
    the blocks are published in our prefix cache, where the request that wanted them finds them

Nothing that goes wrong is an error of the request: what has not come is computed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

import grpc
import grpc.aio

from kvtransfer.errors import TransferRefused
from kvtransfer.manifest import check_epoch, check_push_token, unknown_reservation
from kvtransfer.receiver.delegates import PULL_PREFIX
from kvtransfer.receiver.push import PushTarget
from pdmesh.engine.errors import DuplicateRequest, InvalidRequest, RequestTooLarge, UnknownAdapter
from pdmesh.engine.interface import ExpectedBlocks, KVSharing, ServingEngine
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.failpoints import hit_async
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import common_pb2, prefill_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc

TOKEN_BYTES = 32
ATTEMPT = 1
FIXED_S = 0.004
"""What a pull costs beside its bytes: two calls and a hello."""
ASSUMED_BYTES_PER_S = 1e9
WORTH = 0.8
"""The pull has to be predicted to take less than this share of the computation that it saves."""
PATIENCE = 2.0
"""A pull is given up after so many times the predicted time of the computation, and after `LEAST_LIMIT_S` at the earliest."""
LEAST_LIMIT_S = 0.1
LEFT_OUT_S = 5.0
"""How long a holder that failed is not asked."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullTools:
    """Hold what pulls need of the worker. `compute_s(first, last)` predicts the computation of a prompt's tokens; None: the
    worker cannot tell yet. `quiesce(reservation_id)` returns once no writer writes into its blocks."""

    engine: ServingEngine
    sharing: KVSharing
    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    epoch: int
    endpoints: Callable[[], list[common_pb2.TransferEndpoint]]
    quiesce: Callable[[str], Awaitable[None]]
    channel: Callable[[str], grpc.aio.Channel]
    compute_s: Callable[[int, int], float | None]
    bytes_per_token: float
    lease_s: float
    is_forced: bool = False  # pull whatever is missing, even where computing it is quicker


@dataclass
class PullCounts:
    """Count pulls since the start, by how they ended."""

    num_tokens: int = 0
    num_bytes: int = 0
    num_pulls: int = 0
    num_failed: int = 0


@dataclass(eq=False)
class _Pull:
    """A reservation of ours, while another worker may write into it."""

    reservation: common_pb2.Reservation
    expected: ExpectedBlocks
    is_open: bool = False  # a push was accepted
    is_fenced: bool = False
    num_tokens: int = 0  # that were committed


@dataclass
class _Holder:
    """What is known of a worker that was asked."""

    bytes_per_s: float = ASSUMED_BYTES_PER_S
    not_before: float = field(default=float("-inf"))  # monotonic seconds


class KVPuller:
    """Pull blocks for requests, and decide about the pushes that bring them (`kvtransfer.receiver.push.ReceiverDelegate`)."""

    def __init__(self, tools: PullTools) -> None:
        self.counts = PullCounts()
        self._tools = tools
        self._pulls: dict[str, _Pull] = {}
        self._holders: dict[str, _Holder] = {}
        self._serial = itertools.count(1)

    @property
    def token_s(self) -> float:
        """Return how long a token's KV should take to come, in seconds, from a holder that was not asked before."""
        return self._tools.bytes_per_token / ASSUMED_BYTES_PER_S

    async def pull(self, request: EngineRequest, holder: prefill_pb2.KVHolder) -> int:
        """Bring the KV of a request's first tokens into the prefix cache; return how many tokens came, 0 where it is not worth it
        or fails. Raises EngineStopped."""
        known = self._holders.setdefault(holder.address, _Holder())
        num_tokens = holder.num_tokens - holder.num_tokens % self._tools.layout.block_size
        if time.monotonic() < known.not_before or request.sampling.prompt_logprobs is not None or request.pooling is not None:
            return 0
        if not self._is_worth(known, 0, num_tokens):  # nothing is reserved where even all of it is too little
            return 0
        wanted = _of_first_tokens(request, num_tokens, f"k:{request.request_id}:{next(self._serial)}")
        try:
            expected = await self._tools.sharing.expect(wanted)
        except (InvalidRequest, RequestTooLarge, DuplicateRequest, UnknownAdapter):
            return 0
        if expected is None:
            return 0
        pull = self._open(wanted, expected)
        try:
            if not self._is_worth(known, expected.reserved.num_cached_tokens, num_tokens):
                return 0
            return await self._ask(pull, holder, known)
        finally:
            await _to_its_end(self._close(pull))

    def _open(self, wanted: EngineRequest, expected: ExpectedBlocks) -> _Pull:
        adapter = wanted.adapter
        reservation = common_pb2.Reservation(
            reservation_id=f"{PULL_PREFIX}{next(self._serial)}",
            epoch=self._tools.epoch,
            attempt=ATTEMPT,
            lease_ms=round(self._tools.lease_s * 1000),
            token=secrets.token_bytes(TOKEN_BYTES),
            endpoints=self._tools.endpoints(),
            num_cached_tokens=expected.reserved.num_cached_tokens,
            layout=self._tools.layout,
            adapter=adapter.name if adapter else "",
            adapter_digest=adapter.digest if adapter else "",
        )
        pull = self._pulls[reservation.reservation_id] = _Pull(reservation, expected)
        return pull

    async def _close(self, pull: _Pull) -> None:
        pull.is_fenced = True
        await self._tools.quiesce(pull.reservation.reservation_id)
        del self._pulls[pull.reservation.reservation_id]
        await self._tools.engine.release(pull.expected.reserved.request.request_id)

    async def _ask(self, pull: _Pull, holder: prefill_pb2.KVHolder, known: _Holder) -> int:
        """Have the holder push, and wait for it; return how many tokens came."""
        cached = pull.expected.reserved.num_cached_tokens
        message = worker_pb2.SendBlocksRequest(
            epoch=holder.epoch,
            hashes=pull.expected.hashes,
            reservation=pull.reservation,
            identity=self._tools.identity,
        )
        limit_s = max(LEAST_LIMIT_S, PATIENCE * (self._tools.compute_s(cached, pull.expected.reserved.num_tokens) or 0.0))
        stub = worker_pb2_grpc.WorkerControlStub(self._tools.channel(holder.address))
        began = time.monotonic()
        await hit_async("pull.asked")
        try:
            answer = await stub.SendBlocks(message, timeout=limit_s)
        except grpc.aio.AioRpcError as error:
            self._failed(holder, known, error)
            return 0
        finally:
            self.counts.num_tokens += max(0, pull.num_tokens - cached)
        self.counts.num_pulls += 1
        self.counts.num_bytes += answer.num_bytes
        busy_s = max(1e-4, time.monotonic() - began - FIXED_S)
        known.bytes_per_s = 0.7 * known.bytes_per_s + 0.3 * answer.num_bytes / busy_s
        return max(0, pull.num_tokens - cached)

    def _failed(self, holder: prefill_pb2.KVHolder, known: _Holder, error: grpc.aio.AioRpcError) -> None:
        """Count a failure, and leave its holder out for a while unless the blocks are just not there any more."""
        self.counts.num_failed += 1
        logger.info("no KV came from %s: %s %s", holder.address, error.code().name, error.details())
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            known.not_before = time.monotonic() + LEFT_OUT_S

    def _is_worth(self, known: _Holder, cached: int, num_tokens: int) -> bool:
        """Return whether tokens `cached` to `num_tokens` come sooner than they are computed, as far as can be told."""
        if num_tokens - cached < self._tools.layout.block_size:
            return False
        if self._tools.is_forced:
            return True
        compute_s = self._tools.compute_s(cached, num_tokens)
        pull_s = FIXED_S + (num_tokens - cached) * self._tools.bytes_per_token / known.bytes_per_s
        return compute_s is not None and pull_s < WORTH * compute_s

    # What the receiver asks.

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        """Return the blocks to write into. Raises TransferRefused."""
        check_epoch(hello, self._tools.epoch)
        pull = self._pulls.get(hello.reservation_id)
        if pull is None or pull.is_fenced:
            raise unknown_reservation(hello.reservation_id)
        check_push_token(hello, epoch=self._tools.epoch, token=pull.reservation.token, attempt=ATTEMPT)
        if pull.is_open:
            raise TransferRefused(grpc.StatusCode.ABORTED, "its blocks were pushed before", field="attempt")
        pull.is_open = True
        reserved = pull.expected.reserved
        return PushTarget(
            reservation_id=hello.reservation_id,
            attempt=ATTEMPT,
            block_ids=reserved.block_ids,
            first_block=reserved.num_cached_tokens // self._tools.layout.block_size,
            num_tokens=reserved.num_tokens,
            may_be_shorter=True,
        )

    def push_progress(self, target: PushTarget) -> bool:
        """Return False to fence the writer."""
        pull = self._pulls.get(target.reservation_id)
        return pull is not None and not pull.is_fenced

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        """Add what came to the prefix cache. Raises TransferRefused."""
        pull = self._pulls.get(target.reservation_id)
        if pull is None or pull.is_fenced:
            raise unknown_reservation(target.reservation_id)
        if commit.choices:
            raise TransferRefused(grpc.StatusCode.INVALID_ARGUMENT, "blocks alone have no first tokens", field="commit.choices")
        await self._tools.sharing.take_in(pull.expected.reserved.request.request_id, commit.num_tokens)
        pull.num_tokens = commit.num_tokens

    def push_failed(self, target: PushTarget, reason: str) -> None:
        """Do nothing: the holder's answer says it, and nothing was published."""

    def push_finished(self, target: PushTarget) -> None:
        """Do nothing: there is nothing to finish."""


def _of_first_tokens(request: EngineRequest, num_tokens: int, request_id: str) -> EngineRequest:
    """Return a request for the KV of the first tokens of another one, prompt and history."""
    tokens = (*request.prompt, *max(request.emitted, key=len, default=()))[:num_tokens]
    return EngineRequest(
        request_id,
        tokens,
        SamplingParams(max_tokens=1),
        cache_root=request.cache_root,
        adapter=request.adapter,
    )


async def _to_its_end(work: Coroutine[object, object, object]) -> None:
    """Await the end of `work`; a cancellation meanwhile is raised after it, not instead of it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
