"""Fetches prefixes that many requests share from other workers, before a request asks for them: a worker that has just started is
cold, and routers say what is used most (WarmPrefix).

    part by part:   requests first ── room? ── the worker's own tiers ── else the holder (kv_pull.py) ──► the prefix cache

It takes only blocks that nothing uses: the prefix cache of the worker's own requests loses none, and no request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from pdmesh.engine.errors import EngineStopped, InvalidRequest, NotLoaded, RequestTooLarge
from pdmesh.engine.interface import KVSharing, ServingEngine
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable, Unimplemented
from pdmesh.v1 import common_pb2, prefill_pb2, worker_pb2
from prefill_service.kv_pull import KVPuller

UNTOUCHED_SHARE = 0.25
"""The share of the pool that has to be free and without any content beside what comes."""
PART_BYTES = 32 << 20
MAX_S = 60.0
"""Time that all fetching may take, from the start of the worker on."""
QUIET_S, LOOK_S = 1.0, 0.02
"""How long a call waits for requests that come first, and how often it looks."""
RETRY_DELAY_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmTools:
    """Hold what warming needs of the worker. `restore` brings what the worker's own tiers have; None: it has none. `max_blocks`:
    that are taken in all, and of `block_bytes` each."""

    engine: ServingEngine
    sharing: KVSharing
    puller: KVPuller
    translate: Callable[[common_pb2.TokenRequest], Awaitable[EngineRequest]]
    restore: Callable[[EngineRequest], Awaitable[object]] | None
    is_draining: Callable[[], bool]
    epoch: int
    block_size: int
    block_bytes: int
    max_blocks: int
    max_tokens: int  # of the longest prompt that there is


class KVWarmer:
    """Serve WarmPrefix, one prefix at a time. `tools` None: this worker takes none."""

    def __init__(self, tools: WarmTools | None) -> None:
        self._tools = tools
        self._is_fetching = False
        self._num_taken = 0
        self._spent_s = 0.0

    @property
    def max_blocks(self) -> int:
        """Return how many blocks it takes in all."""
        return 0 if self._tools is None else self._tools.max_blocks

    async def warm(self, message: worker_pb2.WarmPrefixRequest) -> worker_pb2.WarmPrefixResponse:
        """Fetch what is missing of a prefix. Raises MeshError."""
        tools = self._tools
        if tools is None or not tools.max_blocks:
            raise Unimplemented("this worker takes no prefixes before requests ask for them")
        prefix, holder = await self._check(message, tools)
        if self._is_fetching:
            raise ResourceExhausted("another prefix is fetched at the moment", retry_delay_s=RETRY_DELAY_S)
        self._is_fetching = True
        try:
            return await self._warm(tools, prefix, holder)
        except EngineStopped as error:
            raise Unavailable(f"this worker is stopping: {error}") from error
        except (InvalidRequest, RequestTooLarge) as error:
            raise InvalidArgument("request", str(error)) from error
        except NotLoaded as error:
            raise FailedPrecondition(error.field, str(error)) from error
        finally:
            self._is_fetching = False

    async def _check(self, message: worker_pb2.WarmPrefixRequest, tools: WarmTools) -> tuple[EngineRequest, prefill_pb2.KVHolder]:
        if message.epoch != tools.epoch:
            raise FailedPrecondition("epoch", f"{message.epoch:#x} is not this worker's: it has restarted")
        for name in ("holder_address", "holder_epoch"):
            if not getattr(message, name):
                raise InvalidArgument(name, "missing; name the worker that has the prefix")
        if not message.HasField("request"):
            raise InvalidArgument("request", "missing")
        if message.request.emitted:
            raise InvalidArgument("request.emitted", "given; a prefix is a prompt alone")
        num_tokens = len(message.request.prompt_token_ids)
        if num_tokens % tools.block_size:
            problem = f"{num_tokens} tokens are not whole blocks of {tools.block_size}"
            raise InvalidArgument("request.prompt_token_ids", problem)
        if num_tokens > tools.max_tokens:
            raise InvalidArgument("request.prompt_token_ids", f"{num_tokens} tokens; a prompt has {tools.max_tokens} at most")
        request = await tools.translate(message.request)
        holder = prefill_pb2.KVHolder(address=message.holder_address, epoch=message.holder_epoch, num_tokens=num_tokens)
        return replace(request, request_id="w"), holder

    async def _warm(self, tools: WarmTools, prefix: EngineRequest, holder: prefill_pb2.KVHolder) -> worker_pb2.WarmPrefixResponse:
        first = here = await self._num_here(tools, prefix)
        num_blocks, is_over = len(prefix.prompt) // tools.block_size, False
        part_blocks = max(1, PART_BYTES // tools.block_bytes)
        while here < num_blocks and await self._requests_are_served(tools):
            end = min(num_blocks, here + part_blocks, here + tools.max_blocks - self._num_taken)
            is_over = end == here or not await self._may_take(tools, end - here)
            if is_over:
                break
            began, before = time.monotonic(), here
            await self._bring(tools, replace(prefix, prompt=prefix.prompt[: end * tools.block_size]), holder)
            self._spent_s += time.monotonic() - began
            here = await self._num_here(tools, prefix)
            self._num_taken += max(0, here - before)
            if here < end:  # the holder has no more, or fails
                break
        came = max(0, here - first) * tools.block_size
        return worker_pb2.WarmPrefixResponse(num_tokens=came, num_cached_tokens=here * tools.block_size, is_over=is_over)

    async def _bring(self, tools: WarmTools, part: EngineRequest, holder: prefill_pb2.KVHolder) -> None:
        if tools.restore is not None:
            await tools.restore(part)
        await tools.puller.warm(part, holder)

    async def _num_here(self, tools: WarmTools, prefix: EngineRequest) -> int:
        return (await tools.sharing.lacking(prefix.block_root, prefix.prompt))[0]

    async def _requests_are_served(self, tools: WarmTools) -> bool:
        """Wait until no prompt waits, and none is fetched for a request; False: that has lasted too long."""
        ends = time.monotonic() + QUIET_S
        while tools.puller.num_open or (await tools.engine.stats()).num_waiting:
            if time.monotonic() >= ends:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _may_take(self, tools: WarmTools, num_blocks: int) -> bool:
        """Return whether so many more blocks are in the way of nothing: the pool has them free and without content."""
        stats = await tools.engine.stats()
        untouched = stats.num_free_blocks - stats.num_cached_blocks  # or more: cached ones may be in use
        has_room = untouched - num_blocks >= UNTOUCHED_SHARE * stats.num_total_blocks
        return has_room and self._spent_s < MAX_S and not tools.is_draining()
