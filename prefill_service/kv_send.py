"""Pushes blocks of this worker's prefix cache to another worker, which has asked for them by their hashes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator

from kvtransfer.manifest import check_identity, check_same_layout
from kvtransfer.sender.push import PushJob
from kvtransfer.sender.send_queue import FirstTokensDrawn, complete_readiness
from kvtransfer.sender.sender import Sender
from pdmesh.adapter_id import AdapterId
from pdmesh.engine.errors import EngineStopped
from pdmesh.engine.interface import KVSharing
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime import failpoints
from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unavailable, Unimplemented
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import common_pb2, worker_pb2

MOST_SENDS = 4
"""At a time: a worker that others read from decodes as well."""
MAX_HASHES = 1 << 16
MAX_HASH_BYTES = 64
MAX_PUSH_S = 60.0
MOST_WAITS = 64
"""So many others wait at a time for blocks that are being computed."""
MAX_WAIT_MS = 60_000
LONGEST_CALL_S = 0.25
"""Waits are divided into calls of this length, so that the other worker soon misses one that has stopped."""
SLOT_S = 0.02
"""How long one of the others may take that are sent blocks: it is waited for, too."""
LOOK_SHARE, LEAST_LOOK_S, MOST_LOOK_S = 0.25, 0.01, 0.1
"""How often is looked whether they are there: after this share of the time that they should still take."""
RETRY_DELAY_S = 0.1


class BlockSender:
    """Serve SendBlocks. `sharing` None: the engine cannot."""

    def __init__(
        self,
        sharing: KVSharing | None,
        sender: Sender,
        identity: common_pb2.Identity,
        layout: common_pb2.KVLayout,
        *,
        epoch: int,
        max_tokens: int,
        compute_s: Callable[[int, int], float | None] = lambda first, last: None,
        restore: Callable[[EngineRequest], Awaitable[object]] | None = None,
        adapter_of: Callable[[str, str], AdapterId] | None = None,
    ) -> None:
        """Create it. `max_tokens`: of the longest prompt that there is. `compute_s(first, last)` predicts the computation of a
        prompt's tokens; None: the worker cannot tell yet. `restore` brings what the worker's tiers have of a prompt into its
        pool; None: it has none. `adapter_of(name, digest)` raises FailedPrecondition."""
        self._sharing = sharing
        self._sender = sender
        self._identity = identity
        self._layout = layout
        self._epoch = epoch
        self._max_tokens = max_tokens
        self._restore = restore
        self._adapter_of = adapter_of
        self._serial = itertools.count(1)
        self._compute_s = compute_s
        self._num_sends = self.num_waits = 0
        self._num_in_background = 0
        self.num_blocks_sent = 0

    async def send(self, request: worker_pb2.SendBlocksRequest) -> worker_pb2.SendBlocksResponse:
        """Push the longest beginning of the blocks that is here, when those have come that a prompt under way computes. Raises
        MeshError; nothing stays pinned."""
        sharing = self._sharing
        if sharing is None:
            raise Unimplemented("this worker's engine cannot send blocks of its prefix cache")
        self._check(request)
        began = time.monotonic()
        try:
            coming_s = await self._wait(sharing, request)
            if coming_s:
                return worker_pb2.SendBlocksResponse(coming_ms=math.ceil(1000 * coming_s))
            waited_ms = round(1000 * (time.monotonic() - began))
            with self._counted(request.in_background):
                response = await self._send(sharing, request)
        except EngineStopped as error:
            raise Unavailable(f"this worker is stopping: {error}") from error
        response.waited_ms = waited_ms
        return response

    async def _wait(self, sharing: KVSharing, request: worker_pb2.SendBlocksRequest) -> float:
        """Wait a while for blocks that are being computed, if that should take no longer than the other worker wants to wait.
        Return how long it should still take, in seconds; 0: they are there, or are not to be waited for."""
        if not request.wait_ms or self.num_waits >= MOST_WAITS:
            return 0.0
        self.num_waits += 1
        began = time.monotonic()
        try:
            while True:
                waited_s = time.monotonic() - began
                expected_s = await self._expected_s(sharing, request)
                if not expected_s and self._num_sends >= MOST_SENDS:  # many have waited for the same
                    expected_s = SLOT_S
                if not expected_s or waited_s + expected_s > request.wait_ms / 1000:
                    return 0.0
                if waited_s > LONGEST_CALL_S:
                    return expected_s
                await asyncio.sleep(min(max(LOOK_SHARE * expected_s, LEAST_LOOK_S), MOST_LOOK_S))
        finally:
            self.num_waits -= 1

    async def _expected_s(self, sharing: KVSharing, request: worker_pb2.SendBlocksRequest) -> float:
        """Return in how many seconds those of the blocks that come should be here; 0: no more come, or it cannot be told."""
        first = request.reservation.num_cached_tokens // self._layout.block_size
        return sum(self._compute_s(*tokens) or 0.0 for tokens in await sharing.coming(first, tuple(request.hashes)))

    @contextlib.contextmanager
    def _counted(self, in_background: bool) -> Iterator[None]:
        """Count a send while it runs. What no request waits for is sent while nothing else is, and takes no place from what
        requests wait for. Raises ResourceExhausted."""
        if in_background and (self._num_sends or self._num_in_background):
            raise ResourceExhausted("others are sent blocks; this can wait", retry_delay_s=RETRY_DELAY_S)
        if self._num_sends >= MOST_SENDS:
            raise ResourceExhausted(f"{MOST_SENDS} others are sent blocks already", retry_delay_s=RETRY_DELAY_S)
        self._num_in_background += in_background
        self._num_sends += not in_background
        try:
            yield
        finally:
            self._num_in_background -= in_background
            self._num_sends -= not in_background

    async def _send(self, sharing: KVSharing, request: worker_pb2.SendBlocksRequest) -> worker_pb2.SendBlocksResponse:
        began_ns = time.monotonic_ns()
        if request.token_ids and self._restore is not None:
            await self._bring_from_tiers(self._restore, sharing, request)
        restore_ns = time.monotonic_ns() - began_ns if request.token_ids else 0
        pin_id = f"send:{next(self._serial)}"
        blocks = await sharing.pin(pin_id, tuple(request.hashes))
        try:
            if not blocks:
                raise NotFound("the first of these blocks is not here (any more)", field="hashes[0]")
            return await self._push(request.reservation, blocks, restore_ns)
        finally:
            await sharing.unpin(pin_id)

    async def _bring_from_tiers(
        self,
        restore: Callable[[EngineRequest], Awaitable[object]],
        sharing: KVSharing,
        request: worker_pb2.SendBlocksRequest,
    ) -> None:
        """Restore what the pool lacks, as for a request of this worker's own. Raises InvalidArgument, FailedPrecondition."""
        name, digest = request.reservation.adapter, request.reservation.adapter_digest
        prefix = EngineRequest(
            f"send:{next(self._serial)}",
            tuple(request.token_ids),
            SamplingParams(max_tokens=1),
            cache_root=request.cache_root,
            adapter=self._adapter_of(name, digest) if name and self._adapter_of is not None else None,
        )
        first = request.reservation.num_cached_tokens // self._layout.block_size
        _, hashes = await sharing.lacking(prefix.block_root, prefix.prompt)
        if hashes[first:] != tuple(request.hashes):
            raise InvalidArgument("token_ids", "with cache_root and adapter, these are not the tokens of the hashes")
        await restore(prefix)

    def _check(self, request: worker_pb2.SendBlocksRequest) -> None:
        if request.epoch != self._epoch:
            raise FailedPrecondition("epoch", f"{request.epoch:#x} is not this worker's: it has restarted")
        if not 1 <= len(request.hashes) <= MAX_HASHES:
            raise InvalidArgument("hashes", f"{len(request.hashes)} are given; give 1 to {MAX_HASHES}")
        if any(not 1 <= len(each) <= MAX_HASH_BYTES for each in request.hashes):
            raise InvalidArgument("hashes", f"a hash has 1 to {MAX_HASH_BYTES} bytes")
        if request.wait_ms > MAX_WAIT_MS:
            raise InvalidArgument("wait_ms", f"{request.wait_ms} is too long; wait {MAX_WAIT_MS} at most")
        for name in ("reservation", "identity"):
            if not request.HasField(name):
                raise InvalidArgument(name, "missing")
        check_identity(self._identity, request.identity)
        check_same_layout(self._layout, request.reservation.layout)
        cached, size = request.reservation.num_cached_tokens, self._layout.block_size
        if cached + len(request.hashes) * size > self._max_tokens:
            raise InvalidArgument(
                "hashes", f"{len(request.hashes)} blocks behind {cached} tokens; a prompt has {self._max_tokens} at most"
            )
        if request.token_ids and len(request.token_ids) != cached + len(request.hashes) * size:
            raise InvalidArgument("token_ids", f"{len(request.token_ids)} are not those up to the end of the last block")
        if request.token_ids and not 1 <= len(request.cache_root) <= MAX_HASH_BYTES:
            raise InvalidArgument("cache_root", f"{len(request.cache_root)} bytes; with token_ids, give 1 to {MAX_HASH_BYTES}")
        if cached % size:
            raise InvalidArgument("reservation.num_cached_tokens", f"{cached} are not whole blocks of {size}")

    async def _push(
        self, reservation: common_pb2.Reservation, blocks: tuple[int, ...], restore_ns: int
    ) -> worker_pb2.SendBlocksResponse:
        first = reservation.num_cached_tokens // self._layout.block_size
        num_blocks = first + len(blocks)
        feed = complete_readiness(self._identity.num_layers, num_blocks, FirstTokensDrawn(()))
        await failpoints.hit_async("pull.send")
        # The blocks in front, which the other worker has, are neither read nor sent.
        job = PushJob(reservation, (*[blocks[0]] * first, *blocks), num_blocks * self._layout.block_size, feed)
        result = await self._sender.push(job, timeout_s=MAX_PUSH_S)
        self.num_blocks_sent += len(blocks)
        return worker_pb2.SendBlocksResponse(
            num_blocks=len(blocks), num_bytes=result.num_bytes, transport=result.transport, restore_ns=restore_ns
        )
