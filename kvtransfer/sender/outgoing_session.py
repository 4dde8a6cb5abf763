"""One push over its connections: parts go out as the prefill makes them final, then the commit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kvtransfer.feed import Ending, KVFeed, NothingToDecode
from kvtransfer.manifest import Part
from kvtransfer.memory import KVMemory
from kvtransfer.schedule import Pipeline, choose_group
from kvtransfer.sender.push import OutgoingConnection
from kvtransfer.sender.push_part import PushJob
from kvtransfer.sender.send_queue import Departure, Departures, Told
from kvtransfer.staging import StagedMemory
from kvtransfer.transports.base import ShowingOutgoing
from kvtransfer.waiting import all_or_first_error

ALIVE_S = 1.0  # between two signs of life while nothing is to be sent, at most
SIGNS_IN_A_LEASE = 5


class OutgoingSession:
    """`connections` are open; the first one carries what concerns the whole push. Errors are those of OutgoingConnection."""

    def __init__(self, connections: Sequence[OutgoingConnection], pipeline: Pipeline, memory: KVMemory, lease_s: float) -> None:
        self.connections = connections
        self._memory = memory
        self._told: Told | None = None
        self._alive_s = min(ALIVE_S, lease_s / SIGNS_IN_A_LEASE)
        self._pipeline = pipeline
        self._num_steps_seen = -1
        self._num_exposed_bytes = 0

    @property
    def first(self) -> OutgoingConnection:
        return self.connections[0]

    @property
    def transport(self) -> str:
        """The name of the transport."""
        return self.first.transport

    @property
    def num_bytes(self) -> int:
        """Verified by the receiver."""
        return sum(connection.num_bytes for connection in self.connections)

    @property
    def busy_s(self) -> float:
        """How long the connections were at work, the longest of them."""
        return max(connection.busy_s for connection in self.connections)

    async def send_parts(self, job: PushJob, bytes_per_s: float) -> int:
        """Send all that decode lacks and wait until it is verified; returns the bytes that were left when the prefill ended.
        `bytes_per_s`: what to expect of the connection."""
        departures = Departures(len(self.connections))
        try:
            with self._listening(job.feed):
                pumps = (connection.pump(departures) for connection in self.connections)
                await all_or_first_error(self._feed(job, departures, bytes_per_s), *pumps)
        finally:
            await departures.drop()
        return self._num_exposed_bytes

    @contextmanager
    def _listening(self, feed: KVFeed) -> Iterator[None]:
        """Takes note of marks as the prefill tells what is final."""
        if not isinstance(self._memory, StagedMemory):
            yield
            return
        self._told = Told(self._memory)
        self._told.note(feed.ready)
        feed.on_ready = self._told.note
        try:
            yield
        finally:
            feed.on_ready = None

    async def ending(self, job: PushJob) -> Ending:
        """Wait until the prefill has ended."""
        return await self.first.while_open(self._ending(job))

    async def _ending(self, job: PushJob) -> Ending:
        while job.feed.ending is None:
            if await self._is_quiet(job):
                await self.first.keep_alive()
        return job.feed.ending

    async def _feed(self, job: PushJob, departures: Departures, bytes_per_s: float) -> None:
        while not self._pipeline.is_complete and not isinstance(job.feed.ending, NothingToDecode):
            feed, is_idle = job.feed, True
            has_ended = feed.ending is not None
            for part in self._pipeline.take(feed.ready, partial(self._choose_group, feed, bytes_per_s)):
                is_idle = False
                self._num_exposed_bytes += has_ended * part.num_bytes(self._pipeline.bytes_per_layer_block)
                await departures.put(self._departure(job, part))
            if is_idle and await self._is_quiet(job):
                await self.first.keep_alive()
        await departures.end()

    def _departure(self, job: PushJob, part: Part) -> Departure:
        ids = job.source_block_ids[part.block_start : part.block_end]
        final = None if self._told is None else self._told.final(part)
        return Departure(part, ids, final, is_shown=isinstance(self.first.outgoing, ShowingOutgoing))

    def _choose_group(self, feed: KVFeed, bytes_per_s: float, layer_bytes: int) -> int:
        feed.group = choose_group(self._memory.num_layers, bytes_per_s, layer_bytes)
        return feed.group

    async def _is_quiet(self, job: PushJob) -> bool:
        """Waits for news. True: there were none for a while, though the sender is at work."""
        if await job.feed.changed(self._alive_s) or job.num_steps() == self._num_steps_seen:
            return False
        self._num_steps_seen = job.num_steps()
        return True
