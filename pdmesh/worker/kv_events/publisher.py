"""The publisher of KV events over ZMQ, in the format of vLLM (vllm/distributed/kv_events.py, 0.32), for llm-d, Dynamo and others.

    PUB     topic · sequence (8 bytes, big-endian) · batch                       one for each batch, from 0
    ROUTER  ◄── "" · first sequence          ──► "" · topic · sequence · batch … ──► "" · "" · ff ff ff ff ff ff ff ff · ""

The first batch is AllBlocksCleared, which says that a worker has started. PUB drops what a slow subscriber does not take, so the
subscriber misses a number and asks the ROUTER for it. Where the buffer does not reach back so far, the publisher sends the full
list again, to all, behind AllBlocksCleared, and the answer begins there.

Sockets, encoding and buffer belong to one thread: the event loop hands batches over, and waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdmesh.runtime.config import ConfigError
from pdmesh.text.block_hash import short_name, short_names
from pdmesh.worker.kv_events.feed import BlockFeed, Chain, Update
from pdmesh.worker.kv_events.settings import KVEventSettings, binds, require_libraries
from pdmesh.worker.kv_events.stream import PART_NAMES, parts_of

if TYPE_CHECKING:
    import zmq

END = b"\xff" * 8  # -1: the end of what is repeated
MEDIUM = "GPU"  # vLLM's name for the pool that the engine computes in, also on a CPU
MAX_BUFFER_BYTES = 64 << 20
MAX_UNSENT_BATCHES = 64
MAX_ASKERS = 64
POLL_S = 0.05
LIST_GAP_S = 1.0
HWM = 100_000  # messages that wait for one subscriber, as in vLLM
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys")
_REMOVED = ("block_hashes", "medium")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Hold the events of one batch. `begins_list`: the first of them is AllBlocksCleared; `ends_list`: all blocks are told."""

    removed: tuple[bytes, ...] = ()
    chains: tuple[Chain, ...] = ()
    begins_list: bool = False
    ends_list: bool = False


def batches_of(update: Update) -> Iterator[Batch]:
    """Yield an update in batches of a bounded size. A list has one at least."""
    for start in range(0, len(update.removed), PART_NAMES):
        yield Batch(removed=update.removed[start : start + PART_NAMES])
    parts = [tuple(part) for part in parts_of(update.chains)]
    if update.is_list and not parts:
        parts = [()]
    for number, part in enumerate(parts):
        yield Batch((), part, update.is_list and number == 0, update.is_list and number == len(parts) - 1)


class BatchEncoder:
    """Encode batches as vLLM's msgspec structs are: an array [time, events, rank], with events that are tagged maps or arrays."""

    def __init__(self, *, plain_root: bytes, as_map: bool) -> None:
        """`plain_root`: the root of blocks that need no salt in their extra keys: those without tenant and salt."""
        import msgspec

        self._encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
        self._plain_root = plain_root
        self._as_map = as_map

    def encode(self, batch: Batch, now_s: float) -> bytes:
        """Return the batch's bytes. `now_s`: seconds of Unix time."""
        events = [self._event("AllBlocksCleared", (), ())] if batch.begins_list else []
        if batch.removed:
            events.append(self._event("BlockRemoved", _REMOVED, (list(map(short_name, batch.removed)), MEDIUM)))
        events += map(self._stored, batch.chains)
        return self._encode([now_s, events, 0])

    def _stored(self, chain: Chain) -> object:
        first = chain[0]
        names = short_names([block.block_hash for block in chain])
        tokens = [token for block in chain for token in block.token_ids]
        parent = None if first.parent is None else short_name(first.parent)
        adapter = first.adapter or None
        values = (names, parent, tokens, len(first.token_ids), None, MEDIUM, adapter, self._extra_keys(chain))
        return self._event("BlockStored", _STORED, values)

    def _extra_keys(self, chain: Chain) -> list[list[str] | None]:
        """Return vLLM's keys of each block: the adapter's name, and in the first block of a prompt its salt."""
        first = chain[0]
        of_each = [first.adapter] if first.adapter else []
        is_salted = first.parent is None and first.cache_root != self._plain_root
        of_first = [*of_each, first.cache_root.hex()] if is_salted else of_each
        return [of_first or None, *([of_each or None] * (len(chain) - 1))]

    def _event(self, kind: str, names: tuple[str, ...], values: tuple[object, ...]) -> object:
        return {"type": kind, **dict(zip(names, values, strict=True))} if self._as_map else [kind, *values]


class ReplayBuffer:
    """Keep the last batches, as encoded, within a number of batches and of bytes. Pure."""

    def __init__(self, max_batches: int, max_bytes: int = MAX_BUFFER_BYTES) -> None:
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._list_begins = 0  # sequence of the last AllBlocksCleared
        self.next_sequence = 0

    def add(self, payload: bytes, *, begins_list: bool) -> int:
        """Add the next batch and return its sequence number."""
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        if begins_list:
            self._list_begins = sequence
        self._batches.append((sequence, payload))
        self._num_bytes += len(payload)
        while len(self._batches) > self._max_batches or (self._num_bytes > self._max_bytes and len(self._batches) > 1):
            self._num_bytes -= len(self._batches.popleft()[1])
        return sequence

    def start_of(self, asked: int) -> int | None:
        """Return where an answer to a reader begins that asks for the batches from `asked` on: there, or at the last full list;
        None: the buffer has neither."""
        oldest = self._batches[0][0] if self._batches else self.next_sequence
        if oldest <= asked:
            return asked
        return self._list_begins if oldest <= self._list_begins < self.next_sequence else None

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the batches from `start` on."""
        return ((sequence, payload) for sequence, payload in self._batches if sequence >= start)


class ZmqPublisher:
    """Publish the feed of one worker while `run` runs."""

    def __init__(self, settings: KVEventSettings, plain_root: bytes) -> None:
        """Open the sockets. Raises ConfigError: a library is missing, or an address is taken."""
        require_libraries(settings)
        import zmq

        self._zmq = zmq
        self._topic = settings.kv_events_topic.encode()
        self._encoder = BatchEncoder(plain_root=plain_root, as_map=settings.kv_events_encoding == "map")
        self._buffer = ReplayBuffer(settings.kv_events_buffer)
        self._unsent: queue.Queue[Batch] = queue.Queue(MAX_UNSENT_BATCHES)
        self._askers: list[bytes] = []  # that wait for a full list
        self._needs_list = False
        self._listed_at = -LIST_GAP_S  # monotonic seconds
        self._stopping = False
        self._request_list: Callable[[], object] = lambda: None
        self._context = zmq.Context()
        try:
            self._pub = self._open("--kv-events-endpoint", zmq.PUB, settings.kv_events_endpoint, HWM)
            self._router: zmq.Socket[bytes] | None = None
            if settings.kv_events_replay_endpoint:
                # An answer is queued at once, and ZMQ drops what is above the mark.
                hwm = settings.kv_events_buffer + MAX_UNSENT_BATCHES
                self._router = self._open("--kv-events-replay-endpoint", zmq.ROUTER, settings.kv_events_replay_endpoint, hwm)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = "" if self._router is None else self._router.get_string(zmq.LAST_ENDPOINT)

    async def run(self, feed: BlockFeed) -> None:
        """Publish until cancelled, or until the feed is closed. Raises Unavailable when the engine has stopped."""
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._serve, name="kv-events", daemon=True)
        thread.start()
        try:
            with feed.reader() as backlog:
                self._request_list = lambda: loop.call_soon_threadsafe(backlog.drop)
                async for update in feed.read(backlog):
                    for batch in batches_of(update):
                        await self._hand_over(batch)
        finally:
            self._stopping = True
            await asyncio.to_thread(thread.join)

    async def _hand_over(self, batch: Batch) -> None:
        while True:
            try:
                return self._unsent.put_nowait(batch)
            except queue.Full:
                await asyncio.sleep(POLL_S)

    def _open(self, flag: str, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.SNDHWM, hwm)
        if "[" in endpoint:
            socket.setsockopt(self._zmq.IPV6, 1)
        try:
            (socket.bind if binds(endpoint) else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            remedy = "give another port, or an address of this machine"
            raise ConfigError(flag, f"cannot use {endpoint}: {error}", remedy) from error
        return socket

    # What runs on the thread.

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._take_questions()
                try:
                    self._publish(self._unsent.get(timeout=POLL_S))
                except queue.Empty:
                    continue
        except Exception:  # events are a courtesy: requests go on
            logger.exception("publishing KV events over ZMQ has failed; restart the worker to have them again")
        finally:
            self._context.destroy(linger=0)

    def _publish(self, batch: Batch) -> None:
        payload = self._encoder.encode(batch, time.time())
        sequence = self._buffer.add(payload, begins_list=batch.begins_list)
        self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
        if batch.ends_list:
            self._needs_list = False
            askers, self._askers = self._askers, []
            self._listed_at = time.monotonic()
            for asker in askers:
                self._answer(asker, 0)

    def _take_questions(self) -> None:
        if self._router is None:
            return
        for _ in range(MAX_ASKERS):
            if not self._router.poll(0):
                return
            frames = self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning(
                    "a question for KV events is not an empty frame and a number of 8 bytes: %d frames", len(frames) - 1
                )
            else:
                self._answer(frames[0], int.from_bytes(frames[2], "big"))

    def _answer(self, asker: bytes, asked: int) -> None:
        start = self._buffer.start_of(asked)
        if start is None and time.monotonic() - self._listed_at > LIST_GAP_S:
            self._wait_for_list(asker)
            return
        for sequence, payload in () if start is None else self._buffer.since(start):  # none: the list itself does not fit
            self._reply(asker, self._topic, sequence.to_bytes(8, "big"), payload)
        self._reply(asker, b"", END, b"")

    def _wait_for_list(self, asker: bytes) -> None:
        if len(self._askers) < MAX_ASKERS:  # one that gets no answer asks again
            self._askers.append(asker)
        if not self._needs_list:
            self._needs_list = True
            self._request_list()

    def _reply(self, asker: bytes, *frames: Any) -> None:
        assert self._router is not None
        self._router.send_multipart((asker, b"", *frames))
