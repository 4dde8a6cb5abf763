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
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import grpc.aio

from kvtransfer.errors import TransferRefused
from kvtransfer.manifest import check_epoch, check_push_token, unknown_reservation
from kvtransfer.receiver.delegates import PULL_PREFIX
from kvtransfer.receiver.push import PushTarget
from kvtransfer.stream import to_its_end
from pdmesh.engine.errors import DuplicateRequest, EngineStopped, InvalidRequest, NotLoaded, RequestTooLarge
from pdmesh.engine.interface import ExpectedBlocks, KVSharing, ServingEngine
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime import failpoints
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import common_pb2, prefill_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc
from prefill_service.kv_send import LONGEST_CALL_S

TOKEN_BYTES = 32
ATTEMPT = 1
FIXED_S = 0.004
"""What a pull costs beside its bytes: two calls and a hello."""
ASSUMED_BYTES_PER_S = 1e9
MIN_BYTES_TO_LEARN = 1 << 20
FORGOTTEN_S = 60.0
"""Time in which a learned rate goes two thirds of its way back to the assumed one: a link that was busy is asked again."""
WORTH = 0.8
"""The pull has to be predicted to take less than this share of the computation that it saves."""
PATIENCE = 3.0
"""A pull is given up after so many times its predicted time, or the time of the computation if that is less."""
WAIT_WORTH, MOST_WAIT_S = 1.25, 30.0
"""A holder that is still computing the blocks is waited for where that, and the pull, take little longer than computing them
here behind the prompts that are here: the work is done once, and of a step under way all is counted, which is half of it too
much."""
ASK_AGAIN_S = 0.01
MOST_STALLS = 4
"""A holder is given up whose time to come has not become less in so many calls: its engine may hang."""
LEAST_LIMIT_S, FORCED_LIMIT_S = 0.1, 20.0
LEFT_OUT_S, MOST_LEFT_OUT_S = 5.0, 60.0
"""How long a holder is not asked that failed, twice as long each time; and one that cannot send what we can take."""
RETRY_S = 0.1
"""How long one is not asked that sends as much as it may."""
MAX_HOLDERS = 256
BACKGROUND_LIMIT_S = 5.0
"""How long a part of a prefix may take to come for which no request waits."""

_CANNOT = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullTools:
    """Hold what pulls need of the worker. `compute_s(first, last)` predicts the computation of a prompt's tokens; None: the
    worker cannot tell yet. `quiesce(reservation_id)` returns once no writer writes into its blocks,
    `forget(address)` closes a channel."""

    engine: ServingEngine
    sharing: KVSharing
    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    epoch: int
    endpoints: Callable[[], list[common_pb2.TransferEndpoint]]
    quiesce: Callable[[str], Awaitable[None]]
    channel: Callable[[str], grpc.aio.Channel]
    forget: Callable[[str], Coroutine[object, object, None]]
    compute_s: Callable[[int, int], float | None]
    bytes_per_token: float
    lease_s: float
    is_forced: bool = False  # pull whatever is missing, even where computing it is quicker


@dataclass
class PullCounts:
    """Count pulls since the start, by how they ended; apart from them what came in the background, for no request."""

    num_tokens: int = 0
    num_bytes: int = 0
    num_pulls: int = 0
    num_failed: int = 0
    num_warmed_tokens: int = 0
    num_warmed_bytes: int = 0


class _Waiting:
    """Wait for a holder that computes, over several calls, as long as it advances."""

    def __init__(self, until: float) -> None:
        """`until`: monotonic seconds."""
        self._until = until
        self._least_ms, self._num_stalls = 1 << 32, 0

    def left_ms(self, now: float) -> int:
        """Return how long it may still be waited for."""
        return max(0, round(1000 * (self._until - now)))

    def goes_on(self, coming_ms: int) -> bool:
        """Return whether to ask again behind an answer that it should take so long."""
        if coming_ms < self._least_ms:
            self._least_ms, self._num_stalls = coming_ms, 0
        else:
            self._num_stalls += 1
        return self._num_stalls < MOST_STALLS


class Limits(NamedTuple):
    """Hold how long a pull may take, and before it how long its holder may take to compute what it lacks, in seconds."""

    limit_s: float
    wait_s: float


@dataclass(eq=False)
class _Pull:
    """A reservation of ours, while another worker may write into it."""

    reservation: common_pb2.Reservation
    expected: ExpectedBlocks
    limit_s: float
    wait_s: float
    in_background: bool = False  # no request waits for it
    is_open: bool = False  # a push was accepted, and has not failed
    is_fenced: bool = False
    num_tokens: int = 0  # that were committed


@dataclass
class Holder:
    """Hold what is known of a worker that was asked. Times in monotonic seconds, passed in."""

    not_before: float = float("-inf")
    num_failures: int = 0  # in a row
    _bytes_per_s: float = ASSUMED_BYTES_PER_S
    _learned_at: float = 0.0

    def bytes_per_s(self, now: float) -> float:
        """Return the expected rate: what was learned, as far as it is not forgotten."""
        kept = math.exp((self._learned_at - now) / FORGOTTEN_S)
        return ASSUMED_BYTES_PER_S + (self._bytes_per_s - ASSUMED_BYTES_PER_S) * kept

    def came(self, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a pull that took so long; a small one says little about the rate."""
        self.num_failures = 0
        if num_bytes >= MIN_BYTES_TO_LEARN:
            self._learn(0.7 * self.bytes_per_s(now) + 0.3 * num_bytes / max(1e-4, seconds - FIXED_S), now)

    def failed(self, code: grpc.StatusCode, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a pull of so many bytes that failed after so long."""
        if code is grpc.StatusCode.NOT_FOUND:  # the blocks are just not there any more
            return
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self.not_before = now + RETRY_S
            return
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._learn(min(self.bytes_per_s(now), num_bytes / max(1e-4, seconds)), now)
        self.num_failures += 1
        left_out_s = min(MOST_LEFT_OUT_S, LEFT_OUT_S * 2 ** (self.num_failures - 1))
        self.not_before = now + (MOST_LEFT_OUT_S if code in _CANNOT else left_out_s)

    def _learn(self, bytes_per_s: float, now: float) -> None:
        self._bytes_per_s, self._learned_at = bytes_per_s, now


@dataclass(frozen=True)
class Decision:
    """Hold what was predicted for a pull, in seconds. `is_worth`: it is to be made."""

    pull_s: float
    saved_s: float

    @property
    def is_worth(self) -> bool:
        return self.pull_s < WORTH * self.saved_s

    @property
    def limit_s(self) -> float:
        """Return how long it may take."""
        return max(LEAST_LIMIT_S, min(self.saved_s, PATIENCE * self.pull_s))

    def wait_s(self, queue_s: float) -> float:
        """Return how long the holder may take to compute what it lacks, where prompts before this one take `queue_s` here."""
        return min(MOST_WAIT_S, max(0.0, WAIT_WORTH * (queue_s + self.saved_s) - self.pull_s))


@dataclass(frozen=True)
class Offer:
    """Hold what a holder sends if it is asked: the first `num_tokens` of a prompt, whole blocks, of which those behind
    `num_in_pool` are restored from its tiers first, in `restore_token_s` each."""

    num_tokens: int
    num_in_pool: int
    restore_token_s: float = 0.0

    @classmethod
    def of(cls, holder: prefill_pb2.KVHolder, block_size: int) -> list[Offer]:
        """Return the offers of a holder: what its pool has; and, if there is more, what its tiers have with it."""
        num_tokens = holder.num_tokens - holder.num_tokens % block_size
        in_pool = holder.num_tokens - holder.num_tier_tokens
        in_pool -= in_pool % block_size
        plain = [cls(in_pool, in_pool)] if in_pool else []
        return [*plain, cls(num_tokens, in_pool, holder.restore_token_s)] if num_tokens > in_pool else plain

    @property
    def needs_tiers(self) -> bool:
        return self.num_tokens > self.num_in_pool

    def restore_s(self, cached: int) -> float:
        """Return how long the holder will restore, where the first `cached` tokens are not asked for."""
        return max(0, self.num_tokens - max(cached, self.num_in_pool)) * self.restore_token_s


FORCED, NOTHING = Decision(0.0, math.inf), Decision(0.0, 0.0)


class KVPuller:
    """Pull blocks for requests, and decide about the pushes that bring them (`kvtransfer.receiver.push.ReceiverDelegate`)."""

    def __init__(self, tools: PullTools) -> None:
        self.counts = PullCounts()
        self._tools = tools
        self._pulls: dict[str, _Pull] = {}
        self._under_way: dict[tuple[bytes, tuple[int, ...]], asyncio.Event] = {}  # by root and tokens
        self._holders: OrderedDict[tuple[str, int], Holder] = OrderedDict()  # by address and epoch, the last used last
        self._forgetting: set[asyncio.Future[None]] = set()
        self._serial = itertools.count(1)

    @property
    def token_s(self) -> float:
        """Return how long a token's KV should take to come, in seconds, from a holder that was not asked before."""
        return self._tools.bytes_per_token / ASSUMED_BYTES_PER_S

    @property
    def num_open(self) -> int:
        """Return how many pulls hold blocks now, which they give back soon."""
        return len(self._pulls)

    async def pull(self, request: EngineRequest, holder: prefill_pb2.KVHolder) -> int | None:
        """Bring the KV of a request's first tokens into the prefix cache; return how many tokens came, 0 where it is not worth
        it; None: the holder failed to send them. Raises EngineStopped."""
        now = time.monotonic()
        known = self._known(holder)
        if now < known.not_before or request.sampling.prompt_logprobs is not None or request.pooling is not None:
            return 0
        tokens = request.history
        offer = self._best_offer(known, holder, len(tokens))
        if offer is None:
            return 0
        key = (request.block_root, tokens[: offer.num_tokens])
        if key in self._under_way:  # another request has asked for the same: it will be here
            await self._under_way[key].wait()
            return 0
        self._under_way[key] = done = asyncio.Event()
        try:
            return await self._pull(request, tokens, offer, holder, known)
        finally:
            del self._under_way[key]
            done.set()

    def _best_offer(self, known: Holder, holder: prefill_pb2.KVHolder, num_all: int) -> Offer | None:
        """Return the offer that saves most of a prompt of `num_all` tokens; None: none is worth it, even if nothing is here."""
        best, best_s = None, 0.0
        for offer in Offer.of(holder, self._tools.layout.block_size):
            decision = self._decide(known, 0, offer, num_all)
            if decision.is_worth and decision.saved_s - decision.pull_s >= best_s:
                best, best_s = offer, decision.saved_s - decision.pull_s
        return best

    async def warm(self, prefix: EngineRequest, holder: prefill_pb2.KVHolder) -> int:
        """Bring the KV of a prompt of whole blocks that no request waits for, whether or not computing it would be quicker;
        return how many tokens came, 0 where the holder fails or there is no room. A request that wants the same does not wait for
        it. Raises InvalidRequest, RequestTooLarge, NotLoaded or EngineStopped."""
        known = self._known(holder)
        if time.monotonic() < known.not_before:
            return 0
        wanted = self._wanted(prefix, prefix.prompt)
        limits = Limits(BACKGROUND_LIMIT_S, 0.0)
        return await self._fetch(wanted, holder, known, lambda cached: limits, in_background=True) or 0

    async def _pull(
        self, request: EngineRequest, tokens: tuple[int, ...], offer: Offer, holder: prefill_pb2.KVHolder, known: Holder
    ) -> int | None:
        queue_s = await self._queue_s()

        def limits(cached: int) -> Limits | None:
            decision = self._decide(known, cached, offer, len(tokens))
            if not decision.is_worth:
                return None
            return Limits(FORCED_LIMIT_S if self._tools.is_forced else decision.limit_s, decision.wait_s(queue_s))

        try:
            wanted = self._wanted(request, tokens[: offer.num_tokens])
            return await self._fetch(wanted, holder, known, limits, needs_tiers=offer.needs_tiers)
        except (InvalidRequest, RequestTooLarge, DuplicateRequest, NotLoaded):
            return 0

    def _wanted(self, request: EngineRequest, tokens: tuple[int, ...]) -> EngineRequest:
        """Return the request under which blocks for the KV of these first tokens of another one are reserved."""
        return EngineRequest(
            f"k:{request.request_id}:{next(self._serial)}",
            tokens,
            SamplingParams(max_tokens=1),
            cache_root=request.cache_root,
            adapter=request.adapter,
        )

    async def _fetch(
        self,
        wanted: EngineRequest,
        holder: prefill_pb2.KVHolder,
        known: Holder,
        limits_of: Callable[[int], Limits | None],
        *,
        in_background: bool = False,
        needs_tiers: bool = False,
    ) -> int | None:
        """Reserve blocks and have them filled. `limits_of(cached)`: how long that may take where so many tokens are here already;
        None: it is not worth it. `needs_tiers`: the holder has to restore some of them."""
        pull: _Pull | None = None
        try:
            expected = await self._tools.sharing.expect(wanted)
            limits = None if expected is None else limits_of(expected.reserved.num_cached_tokens)
            if expected is None or limits is None:
                return 0
            pull = self._open(wanted, expected, limits, in_background)
            return await self._ask(pull, holder, known, wanted if needs_tiers else None)
        finally:
            await to_its_end(self._close(wanted.request_id, pull))

    async def _queue_s(self) -> float:
        """Return how long the prompts that are here should take to compute."""
        return sum(self._tools.compute_s(first, last) or 0.0 for first, last in await self._tools.sharing.to_compute())

    def _known(self, holder: prefill_pb2.KVHolder) -> Holder:
        """Return what is known of a holder; what was not used for long is forgotten."""
        key = (holder.address, holder.epoch)
        known = self._holders.setdefault(key, Holder())
        self._holders.move_to_end(key)
        if len(self._holders) > MAX_HOLDERS:
            (address, _), _ = self._holders.popitem(last=False)
            if all(address != other for other, _ in self._holders):  # else a later process there is asked over the channel
                self._forgetting.add(task := asyncio.ensure_future(self._tools.forget(address)))
                task.add_done_callback(self._forgetting.discard)
        return known

    def _decide(self, known: Holder, cached: int, offer: Offer, num_all: int) -> Decision:
        """Return what is predicted if the tokens of an offer behind the first `cached` of a prompt of `num_all` come, and are not
        computed."""
        num_tokens = offer.num_tokens
        if num_tokens - cached < self._tools.layout.block_size:
            return NOTHING
        if self._tools.is_forced:
            return FORCED
        whole_s, rest_s = self._tools.compute_s(cached, num_all), self._tools.compute_s(num_tokens, num_all)
        if whole_s is None or rest_s is None:
            return NOTHING
        num_bytes = (num_tokens - cached) * self._tools.bytes_per_token
        comes_s = FIXED_S + num_bytes / known.bytes_per_s(time.monotonic()) + offer.restore_s(cached)
        return Decision(comes_s, whole_s - rest_s)

    def _open(self, wanted: EngineRequest, expected: ExpectedBlocks, limits: Limits, in_background: bool) -> _Pull:
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
        pull = self._pulls[reservation.reservation_id] = _Pull(reservation, expected, *limits, in_background)
        return pull

    async def _close(self, request_id: str, pull: _Pull | None) -> None:
        """Give back what `expect` has reserved, if it has, behind the last writer."""
        if pull is not None:
            pull.is_fenced = True
            await self._tools.quiesce(pull.reservation.reservation_id)
            del self._pulls[pull.reservation.reservation_id]
        await self._tools.engine.release(request_id)

    async def _ask(self, pull: _Pull, holder: prefill_pb2.KVHolder, known: Holder, restored: EngineRequest | None) -> int | None:
        """Have the holder push, and wait for it; return how many tokens came, None: it failed. `restored`: what it restores
        first; None: nothing."""
        cached = pull.expected.reserved.num_cached_tokens
        message = worker_pb2.SendBlocksRequest(
            epoch=holder.epoch,
            hashes=pull.expected.hashes,
            reservation=pull.reservation,
            identity=self._tools.identity,
            in_background=pull.in_background,
            token_ids=() if restored is None else restored.prompt,
            cache_root=b"" if restored is None else restored.cache_root,
        )
        stub = worker_pb2_grpc.WorkerControlStub(self._tools.channel(holder.address))
        await failpoints.hit_async("pull.ask")
        waiting = _Waiting(time.monotonic() + pull.wait_s)
        try:
            while True:
                began = time.monotonic()
                message.wait_ms = waiting.left_ms(began)
                timeout_s = pull.limit_s + (2 * LONGEST_CALL_S if message.wait_ms else 0.0)
                answer = await stub.SendBlocks(message, timeout=timeout_s)
                if not answer.coming_ms:
                    break
                if not waiting.goes_on(answer.coming_ms) or not message.wait_ms:
                    self._failed(pull, known, grpc.StatusCode.UNAVAILABLE, f"{holder.address}: it does not advance", began)
                    return None
                await asyncio.sleep(ASK_AGAIN_S)
        except grpc.aio.AioRpcError as error:
            self._failed(pull, known, error.code(), f"{holder.address}: {error.details()}", began)
            return None
        now = time.monotonic()
        known.came(answer.num_bytes, now - began - answer.waited_ms / 1000 - answer.restore_ns / 1e9, now)
        num_tokens = max(0, pull.num_tokens - cached)
        self._count(pull, num_tokens, answer.num_bytes)
        return num_tokens

    def _failed(self, pull: _Pull, known: Holder, code: grpc.StatusCode, problem: str, began: float) -> None:
        """Learn from a holder that has sent nothing."""
        now = time.monotonic()
        num_tokens = pull.expected.reserved.num_tokens - pull.expected.reserved.num_cached_tokens
        known.failed(code, round(num_tokens * self._tools.bytes_per_token), min(now - began, pull.limit_s), now)
        if code is not grpc.StatusCode.NOT_FOUND:  # a block that went away is a miss
            self.counts.num_failed += 1
        logger.info("no KV came from %s (%s)", problem, code.name)

    def _count(self, pull: _Pull, num_tokens: int, num_bytes: int) -> None:
        if pull.in_background:
            self.counts.num_warmed_tokens += num_tokens
            self.counts.num_warmed_bytes += num_bytes
            return
        self.counts.num_pulls += 1
        self.counts.num_tokens += num_tokens
        self.counts.num_bytes += num_bytes

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
        try:
            await self._tools.sharing.take_in(pull.expected.reserved.request.request_id, commit.num_tokens)
        except EngineStopped as error:
            raise TransferRefused(grpc.StatusCode.UNAVAILABLE, f"this worker is stopping: {error}") from error
        pull.num_tokens = commit.num_tokens

    def push_failed(self, target: PushTarget, reason: str) -> None:
        """Let the holder try another transport; nothing was published."""
        pull = self._pulls.get(target.reservation_id)
        if pull is not None:
            pull.is_open = False

    def push_finished(self, target: PushTarget) -> None:
        """Do nothing: there is nothing to finish."""
