"""What the services of a worker need of an engine, whichever computes: ours (pdmesh/engine/engine.py), or vLLM (pdmesh_vllm/).

Everything here is called on the event loop. Our engine answers at once, also while a step runs, and waits for the step only
before it releases what that computes; vLLM answers between steps. Results of steps come through sinks, in their order.

    reserve ──► reserved ──start (its KV has arrived) / run_local (it is computed here)──► runs ──► ends by itself
    add ─────────────────────────────────────────────────────────────────────────────────► runs, or is held (prefill_only)

`release` ends a request in any state, and frees what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from pdmesh.engine.kv_cache.published_blocks import BlockName
from pdmesh.engine.outputs import EngineStats, KVReady, RequestStarted, SequenceUpdate
from pdmesh.engine.request import EngineRequest

NO_STATES: Mapping[int, bytes] = MappingProxyType({})


@dataclass(frozen=True)
class ReservedBlocks:
    """Hold the blocks that reserve() grants."""

    request: EngineRequest
    block_ids: tuple[int, ...]  # of the whole request, the cached prefix first
    num_cached_tokens: int  # whole blocks, fewer than num_tokens
    num_tokens: int  # tokens whose KV must be there before start()
    num_rounded_tokens: int = 0  # of the cached ones: their KV was rounded by a tier


@dataclass(frozen=True)
class ExpectedBlocks:
    """Hold blocks whose KV another worker is to write: `reserved`, and the hashes of those that are not cached here, in order."""

    reserved: ReservedBlocks
    hashes: tuple[bytes, ...]


class KVSharing(Protocol):
    """Move blocks of the prefix cache from and to other workers. Any call may raise EngineStopped."""

    async def expect(self, request: EngineRequest) -> ExpectedBlocks | None:
        """Reserve blocks for the prompt of a request, whole blocks, which another worker has; None: no room now, or all are here.
        The caller releases the request, also where its wait was cancelled.

        Raises InvalidRequest, RequestTooLarge, NotLoaded or DuplicateRequest."""

    async def take_in(self, request_id: str, num_tokens: int, *, is_rounded: bool = False) -> None:
        """Add what has arrived to the prefix cache, the KV of the first `num_tokens` tokens; `is_rounded`: a tier has rounded
        it. Raises UnknownRequest, InvalidState or InvalidRequest (not so many were expected)."""

    async def claim(self, request: EngineRequest) -> None:
        """Keep the blocks of a request's tokens before all others, those that are here and those that come, until it is admitted
        or released: the caller releases it, also where the engine never gets it."""

    async def pin(self, pin_id: str, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Keep the longest beginning of these blocks that is here and exact (neither rounded nor computed from rounded KV), until
        `unpin`; return their ids. Raises InvalidRequest."""

    async def coming(self, first: int, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return what will be computed until the most of some blocks are here that prompts under way bring: each prompt's tokens,
        from the first of two numbers to the second, in the order of turns. The blocks follow each other in a prompt from block
        `first` on. Empty: no more come."""

    async def to_compute(self) -> list[tuple[int, int]]:
        """Return the tokens of prompts that the engine has and has not computed, from the first of two numbers to the second."""

    async def unpin(self, pin_id: str) -> None:
        """Let go of pinned blocks; idempotent."""

    # For tiers beneath the pool.

    async def lacking(self, root: bytes, tokens: Sequence[int]) -> tuple[int, tuple[bytes, ...]]:
        """Return how many of the leading blocks of some tokens are here, and the hashes of all full blocks."""

    async def pin_any(self, pin_id: str, hashes: Sequence[bytes]) -> tuple[int | None, ...]:
        """Keep those of these blocks that are here, until `unpin`; return their ids, None for the others. Raises
        InvalidRequest."""

    def watch_published(self, max_blocks: int) -> None:
        """Log the names of published blocks from now on, at most so many. Call it before the engine is opened."""

    @property
    def has_published(self) -> bool:
        """Return whether `take_published` would return something; cheap."""

    async def take_published(self, most: int) -> list[tuple[BlockName, float]]:
        """Return blocks that were published since the last call, the oldest first, with the seconds for which a session wants
        them."""

    async def take_used(self) -> list[tuple[bytes, ...]]:
        """Return the hashes of the blocks that were found here since the last call, by prompts and other workers."""

    async def take_withdrawn(self) -> list[BlockName]:
        """Return blocks that were published and turned out to be useless since the last call."""

    async def note_tiers(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """Tell the prefix cache's log what tiers hold now, and what none of them holds any more."""


class ServingEngine(Protocol):
    """Reserve, fill, start, run and release requests. Any call may raise EngineStopped."""

    async def reserve(self, request: EngineRequest) -> ReservedBlocks | None:
        """Hold blocks for prompt and history, cached prefix first and pinned; None: no room now, and nothing is held.

        Cancelling the wait may leave the request reserved: the caller releases it. Raises InvalidRequest, RequestTooLarge (it
        never fits), NotLoaded or DuplicateRequest.
        """

    async def restate(self, request_id: str, request: EngineRequest) -> ReservedBlocks | None:
        """Reserve for the same request with more history, in the same blocks or others; None: no room, release it. Nobody
        writes into the blocks meanwhile.

        Raises UnknownRequest, InvalidState (not reserved any more) or InvalidRequest (not the tokens that were reserved for).
        """

    async def start(
        self,
        request_id: str,
        first_tokens: Mapping[int, int],
        draft_states: Mapping[int, bytes] = NO_STATES,
        *,
        is_exact: bool = True,
    ) -> None:
        """Continue by decoding: the reservation's KV has arrived, and these tokens (choice → token id) were emitted elsewhere.
        They are not reported again. Unless the KV `is_exact`, no other request finds it here.

        Raises UnknownRequest, InvalidState or InvalidRequest; the reservation is then unchanged.
        """

    async def run_local(self, request_id: str, request: EngineRequest) -> int:
        """Compute here what the reservation lacks, as no push comes. `request` restates it, perhaps with more history.

        Returns the monotonic nanoseconds at which the engine took it, its PrefillTiming's `opened_ns`.
        Raises UnknownRequest, InvalidState, InvalidRequest or RequestTooLarge; the reservation is then unchanged.
        """

    async def reserve_local(self, request: EngineRequest) -> tuple[ReservedBlocks, int] | None:
        """Do `reserve` and `run_local` in one turn; return what both do. None: no room now."""

    async def add(self, request: EngineRequest) -> bool:
        """Queue a request to be computed here; it gets blocks when its turn comes. False: the engine is full.

        Raises InvalidRequest (also for prefill_only with several choices, where the engine cannot hand them over),
        RequestTooLarge, NotLoaded or DuplicateRequest.
        """

    async def release(self, request_id: str) -> bool:
        """End a request in any state and free everything it has, behind the step if one computes it. False: it is not here (any
        more)."""

    async def stats(self) -> EngineStats:
        """Return counts between two steps, behind all calls before this one, and since start."""


class Sink(Protocol):
    """Receive the events of one engine request, on the event loop and in order: the updates of each step, and once, after the
    updates of its first step, `on_started`."""

    def on_update(self, update: SequenceUpdate) -> None: ...

    def on_started(self, started: RequestStarted, ended_ns: int) -> None: ...


class Sinks(Protocol):
    """Route the engine's results by engine request id (`pdmesh.worker.step_dispatcher.StepDispatcher`)."""

    def add(self, engine_id: str, sink: Sink, on_ready: Callable[[KVReady], None] | None = None) -> None: ...

    def remove(self, engine_id: str) -> None: ...
