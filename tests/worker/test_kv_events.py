"""KV events of a real worker: what a reader over gRPC or ZMQ rebuilds is what ListBlocks says."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import zmq
import zmq.asyncio

from pdmesh.runtime.config import ConfigError, parse
from pdmesh.runtime.errors import error_from_rpc
from pdmesh.text.block_hash import hash_prompt, in_chains, short_name
from pdmesh.v1 import worker_pb2
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.kv_events import feed, publisher, settings, stream
from pdmesh.worker.kv_events.settings import KVEventSettings
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
PROMPTS = [[number + token for token in PROMPT] for number in range(6)]
ON = KVEventSettings(kv_events=True)
NUMBERS = itertools.count()


async def serve(peer: Peer, *prompts: list[int]) -> None:
    router = MiniRouter()
    await router.attach(peer)
    for prompt in prompts:
        name = f"r{next(NUMBERS)}"
        await router.submit(peer, name, token_request(prompt, max_tokens=4), mode=LOCAL)
        await router.until_finished(name)
    await router.detach()


async def listed(peer: Peer) -> set[int]:
    return {name async for part in peer.control.ListBlocks(worker_pb2.ListBlocksRequest()) for name in part.blocks}


@dataclass
class GrpcReader:
    """Rebuilds the cache from WatchBlocks, and checks every message."""

    peer: Peer
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_lists: int = 0
    in_list: bool = False

    def take(self, message: worker_pb2.BlockEvents) -> None:
        assert message.epoch == self.peer.info.epoch
        if message.is_list and not self.in_list:
            self.blocks, self.num_lists = {}, self.num_lists + 1
        self.in_list = message.is_list and not message.is_last
        for name in message.removed:
            del self.blocks[name]
        size = self.peer.info.layout.block_size
        for chain in message.stored:
            assert len(chain.token_ids) == size * len(chain.blocks)
            assert not chain.HasField("parent") or chain.parent in self.blocks
            for index, name in enumerate(chain.blocks):
                assert name not in self.blocks
                self.blocks[name] = tuple(chain.token_ids[size * index : size * (index + 1)])

    async def follow(self) -> None:
        async for message in self.peer.control.WatchBlocks(worker_pb2.WatchBlocksRequest()):
            self.take(message)


@asynccontextmanager
async def following(reader: GrpcReader) -> AsyncIterator[None]:
    task = asyncio.create_task(reader.follow())
    try:
        await eventually(lambda: reader.num_lists or task.done())
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def tokens_of(peer: Peer, prompt: list[int]) -> dict[int, tuple[int, ...]]:
    size, root = peer.info.layout.block_size, peer.worker.kv_events._plain_root
    names = [short_name(block) for block in hash_prompt(root, prompt, size)]
    return {name: tuple(prompt[size * index : size * (index + 1)]) for index, name in enumerate(names)}


async def test_watch_blocks_tells_tokens_and_follows_evictions(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list comes in parts, too."""
    monkeypatch.setattr(stream, "PART_TOKENS", 32)
    async with running_worker(model, engine={"num_blocks": 12}, kv_event_settings=ON) as peer:
        await serve(peer, PROMPT)
        reader = GrpcReader(peer)
        async with following(reader):
            assert reader.blocks == tokens_of(peer, PROMPT)
            await serve(peer, *PROMPTS)
            cached = await listed(peer)
            assert not tokens_of(peer, PROMPT).keys() <= cached  # some were evicted
            await eventually(lambda: reader.blocks.keys() == cached)
            assert reader.num_lists == 1


async def test_a_reader_that_falls_behind_gets_the_list_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_WAITING_BLOCKS", 2)
    async with running_worker(model, kv_event_settings=ON) as peer:
        reader = GrpcReader(peer)
        async with following(reader):
            await serve(peer, PROMPT)  # three blocks at once
            cached = await listed(peer)
            await eventually(lambda: reader.blocks.keys() == cached)
            assert reader.num_lists > 1


async def test_the_full_list_is_ordered_beside_the_loop(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, really = set[int](), in_chains

    def noted(*arguments: Any) -> Iterator[Any]:
        threads.add(threading.get_ident())
        yield from really(*arguments)

    async with running_worker(model, kv_event_settings=ON) as peer:
        await serve(peer, PROMPT)
        monkeypatch.setattr(feed, "in_chains", noted)
        async with following(GrpcReader(peer)):
            assert threads and threading.get_ident() not in threads


async def test_readers_are_refused_without_the_flag_and_beyond_the_limit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker(model) as peer:
        assert peer.engine._pool.events is None  # no tokens are kept
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.control.WatchBlocks(worker_pb2.WatchBlocksRequest()).read()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "--kv-events" in error_from_rpc(caught.value).message
    monkeypatch.setattr(feed, "MAX_READERS", 1)
    async with running_worker(model, kv_event_settings=ON) as peer, following(GrpcReader(peer)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.control.WatchBlocks(worker_pb2.WatchBlocksRequest()).read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_readers_end_when_the_worker_stops(model: Model) -> None:
    async with running_worker(model, kv_event_settings=ON) as peer:
        reader = GrpcReader(peer)
        task = asyncio.create_task(reader.follow())
        await eventually(lambda: reader.num_lists)
        peer.worker.kv_events.close()  # as `stop` does
        await task


# Over ZMQ. The structs are vLLM's (vllm/distributed/kv_events.py, 0.32), by which its subscribers decode.


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass
class ZmqReader:
    """Follows a publisher as vLLM's example does: live batches, and what is missing from the replay socket."""

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    blocks: dict[int, list[int]] = field(default_factory=dict)
    next_sequence: int = 0
    num_cleared: int = 0

    def __post_init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(self.endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, self.topic.encode())

    def take(self, sequence: int, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks, self.num_cleared = {}, self.num_cleared + 1
                continue
            assert event.medium == "GPU"
            for index, name in enumerate(event.block_hashes):
                assert isinstance(name, int)
                if isinstance(event, BlockRemoved):
                    self.blocks.pop(name, None)
                else:
                    self.blocks[name] = event.token_ids[event.block_size * index : event.block_size * (index + 1)]
        self.next_sequence = sequence + 1

    async def replay(self, start: int) -> list[int]:
        """Ask for the batches from `start` on, apply and return their numbers."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.replay_endpoint)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        told = list[int]()
        while True:
            empty, topic, sequence, payload = await asyncio.wait_for(dealer.recv_multipart(), 15)
            assert empty == b""
            if sequence == publisher.END:
                dealer.close(linger=0)
                return told
            assert topic == self.topic.encode()
            told.append(int.from_bytes(sequence, "big"))
            self.take(told[-1], payload)

    async def follow(self) -> None:
        while True:
            topic, number, payload = await self.sub.recv_multipart()
            sequence = int.from_bytes(number, "big")
            assert topic == self.topic.encode()
            if sequence > self.next_sequence:
                await self.replay(self.next_sequence)
            if sequence >= self.next_sequence:
                self.take(sequence, payload)

    def close(self) -> None:
        self.context.destroy(linger=0)


def over_zmq(folder: Path, **overrides: object) -> KVEventSettings:
    given = {"kv_events_endpoint": f"ipc://{folder}/pub", "kv_events_replay_endpoint": f"ipc://{folder}/replay"}
    config = KVEventSettings(**{**given, **overrides})  # type: ignore[arg-type]
    config.validate()
    return config


@asynccontextmanager
async def subscribed(peer: Peer, topic: str = "") -> AsyncIterator[ZmqReader]:
    opened = peer.worker.kv_events.publisher
    assert opened is not None
    reader = ZmqReader(opened.endpoint, opened.replay_endpoint, topic)
    task = asyncio.create_task(reader.follow())
    try:
        yield reader
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        reader.close()


async def test_a_zmq_subscriber_rebuilds_the_cache(model: Model, tmp_path: Path) -> None:
    on = over_zmq(tmp_path, kv_events_topic="kv@w@tiny")
    async with (
        running_worker(model, engine={"num_blocks": 12}, kv_event_settings=on) as peer,
        subscribed(peer, "kv@w@tiny") as reader,
    ):
        await serve(peer, PROMPT)
        await reader.replay(0)  # what came before the subscription
        await eventually(lambda: {name: tuple(each) for name, each in reader.blocks.items()} == tokens_of(peer, PROMPT))
        await serve(peer, *PROMPTS)
        cached = await listed(peer)
        await eventually(lambda: reader.blocks.keys() == cached)
        assert peer.worker.kv_events.publisher._buffer._list_begins == 0  # type: ignore[union-attr]


async def test_events_go_over_tcp_and_as_arrays(model: Model) -> None:
    on = KVEventSettings(kv_events_endpoint="tcp://127.0.0.1:*", kv_events_encoding="array")
    async with running_worker(model, kv_event_settings=on) as peer:
        opened = peer.worker.kv_events.publisher
        assert opened is not None
        assert opened.endpoint.startswith("tcp://127.0.0.1:")
        reader = ZmqReader(opened.endpoint)
        events: list[Any] = []
        try:
            while not events or events[0][0] != "BlockStored":  # until the subscription has arrived
                await serve(peer, [len(events) + token for token in PROMPT])
                if await reader.sub.poll(200):
                    _, _, payload = await reader.sub.recv_multipart()
                    _, events, rank = msgspec.msgpack.decode(payload)
        finally:
            reader.close()
    kind, names, parent, tokens, size, lora_id, medium, lora_name, extra_keys = events[0]
    assert (kind, parent, size, lora_id, medium, lora_name, rank) == ("BlockStored", None, 16, None, "GPU", None, 0)
    assert len(names) * size == len(tokens)
    assert extra_keys == [None] * len(names)


async def test_what_the_buffer_lacks_is_told_by_a_new_list(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LIST_GAP_S", 0.0)
    on = over_zmq(tmp_path, kv_events_buffer=4)
    async with running_worker(model, kv_event_settings=on) as peer:
        opened = peer.worker.kv_events.publisher
        assert opened is not None
        buffer = opened._buffer
        async with subscribed(peer) as reader:
            for number in range(20):
                if buffer.next_sequence > 8:
                    break
                await serve(peer, [7 * number + token for token in PROMPT[:40]])
                await asyncio.sleep(feed.PERIOD_S)
            asked = ZmqReader(opened.endpoint, opened.replay_endpoint)
            told = await asked.replay(0)
            cached = await listed(peer)
            assert asked.num_cleared == 1
            assert asked.blocks.keys() == cached
            assert told[0] > 4
            assert told == list(range(told[0], told[-1] + 1))
            # The other subscribers hear of it, too, and end with the same.
            await eventually(lambda: reader.blocks.keys() == cached and reader.num_cleared >= 1)
            asked.close()


async def test_a_list_that_fits_no_buffer_is_not_sent_for_ever(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PART_TOKENS", 16)
    monkeypatch.setattr(publisher, "LIST_GAP_S", 1000.0)
    async with (
        running_worker(model, kv_event_settings=over_zmq(tmp_path, kv_events_buffer=1)) as peer,
        subscribed(peer) as reader,
    ):
        await serve(peer, PROMPT)
        await eventually(lambda: peer.worker.kv_events.publisher._buffer.next_sequence > 2)  # type: ignore[union-attr]
        assert [await reader.replay(0) for _ in range(3)] == [[], [], []]


async def test_bad_questions_are_passed_over(model: Model, tmp_path: Path) -> None:
    async with running_worker(model, kv_event_settings=over_zmq(tmp_path)) as peer, subscribed(peer) as reader:
        dealer = reader.context.socket(zmq.DEALER)
        dealer.connect(reader.replay_endpoint)
        for frames in ([b""], [b"", b"1"], [b"", bytes(8), b""], [b"x" * 1000]):
            await dealer.send_multipart(frames)
        await eventually(lambda: peer.worker.kv_events.publisher._buffer.next_sequence)  # type: ignore[union-attr]
        assert (await reader.replay(0))[0] == 0
        assert not await dealer.poll(0)
        dealer.close(linger=0)


async def test_a_slow_zmq_subscriber_delays_nobody(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing, its queue is full at once; what it missed is in the buffer."""
    monkeypatch.setattr(publisher, "HWM", 1)
    async with running_worker(model, engine={"num_blocks": 12}, kv_event_settings=over_zmq(tmp_path)) as peer:
        opened = peer.worker.kv_events.publisher
        assert opened is not None
        slow = ZmqReader(opened.endpoint, opened.replay_endpoint)
        await slow.replay(0)
        await serve(peer, *PROMPTS)
        cached = await listed(peer)
        await slow.replay(slow.next_sequence)
        await eventually(lambda: not peer.worker.kv_events.feed._source.has_changes)  # type: ignore[union-attr]
        await asyncio.sleep(2 * publisher.POLL_S)
        await slow.replay(slow.next_sequence)
        assert slow.blocks.keys() == cached
        slow.close()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--kv-events-endpoint", "5557"], "--kv-events-endpoint: '5557' is not tcp://HOST:PORT or ipc://PATH"),
        (["--kv-events-endpoint", "tcp://*:70000"], "--kv-events-endpoint: 'tcp://*:70000' is not"),
        (["--kv-events-endpoint", "inproc://x"], "--kv-events-endpoint: 'inproc://x' is not"),
        (["--kv-events-replay-endpoint", "tcp://*:5558"], "--kv-events-replay-endpoint: nothing is published"),
        (
            ["--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay-endpoint", "tcp://far:5558"],
            "--kv-events-replay-endpoint: it has to listen",
        ),
        (
            ["--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay-endpoint", "tcp://*:5557"],
            "--kv-events-replay-endpoint: the same as kv_events_endpoint",
        ),
        (["--kv-events-buffer", "0"], "--kv-events-buffer: 0 is not 1 to 1000000"),
        (["--kv-events-topic", "x" * 300], "--kv-events-topic: more than 256 bytes"),
        (["--kv-events-encoding", "json"], "--kv-events-encoding"),
    ],
)
def test_wrong_settings_are_named(flags: list[str], problem: str) -> None:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        parse(WorkerConfig, ["--model", "m", *flags], {}, prog="worker")
    assert problem in str(caught.value)


async def test_a_taken_address_is_named(model: Model, tmp_path: Path) -> None:
    async with running_worker(model, kv_event_settings=KVEventSettings(kv_events_endpoint="tcp://127.0.0.1:*")) as peer:
        opened = peer.worker.kv_events.publisher
        assert opened is not None
        port = opened.endpoint.rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"--kv-events-endpoint: cannot use tcp://.*:{port}"):
            publisher.ZmqPublisher(KVEventSettings(kv_events_endpoint=f"tcp://*:{port}"), b"")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(settings, "import_module", missing)
    settings.require_libraries(ON)  # over gRPC none is needed
    with pytest.raises(ConfigError, match=r"--kv-events-endpoint: .* zmq.*; pip install 'pdmesh\[kv-events\]'"):
        settings.require_libraries(KVEventSettings(kv_events_endpoint="tcp://*:5557"))
