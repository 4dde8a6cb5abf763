"""Weights that come in a stream: what arrives is loaded, and what is wrong is named and leaves nothing behind. What is
computed with is kept, for a worker that comes later."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pdmesh.client.weights import files_of, messages_of
from pdmesh.engine.loader.hash import cache_folder
from pdmesh.runtime.errors import MeshError, error_from_rpc
from pdmesh.v1 import worker_pb2
from pdmesh.worker.weight_updates import received
from tests.support.mini_router import MiniRouter
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, load_tiny, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
Sent = worker_pb2.SendWeightsRequest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "other", seed=5)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Peer]:
    engine: dict[str, object] = {"backend": "torch", "dtype": "float32"}
    async with running_worker(load_tiny(make_tiny_model(tmp_path / "present", seed=4)), engine=engine, worker_id="w") as peer:
        yield peer


def left_behind() -> list[Path]:
    folder = cache_folder() / "received"
    return list(folder.iterdir()) if folder.exists() else []


def messages(folder: Path) -> list[Sent]:
    return list(messages_of(*files_of(folder), ""))


async def refused(peer: Peer, sent: Sequence[Sent]) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.control.SendWeights(iter(sent))
    assert left_behind() == []
    return error_from_rpc(caught.value)


async def test_what_was_sent_is_computed_with(worker: Peer, other: Path) -> None:
    before = worker.info.identity.weights_hash
    done = await worker.control.SendWeights(iter(messages(other)))
    assert done.is_new and done.identity.weights_hash != before
    there = load_tiny(other)
    assert done.identity.weights_hash == there.loaded.weights_hash
    router = MiniRouter()
    await router.attach(worker)
    await router.submit(worker, "r1", token_request(PROMPT), mode=LOCAL)
    await router.until_finished("r1")
    assert router.of("r1").output() == reference(there, token_request(PROMPT))[0]
    await router.detach()
    assert [path.name for path in left_behind()] == [f"sent-{done.identity.weights_hash}"], "kept for a worker that comes later"
    again = await worker.control.SendWeights(iter(messages(other)))  # beside what else belongs to the first model
    assert not again.is_new


@asynccontextmanager
async def another_worker(folder: Path, worker_id: str = "later") -> AsyncIterator[Peer]:
    engine: dict[str, object] = {"backend": "torch", "dtype": "float32"}
    async with running_worker(load_tiny(folder), engine=engine, worker_id=worker_id) as peer:
        yield peer


async def read(peer: Peer, weights_hash: str) -> list[Sent]:
    request = worker_pb2.ReadWeightsRequest(weights_hash=weights_hash)
    return [message.piece async for message in peer.control.ReadWeights(request)]


def read_out(folder: Path, weights_hash: str) -> list[Sent]:
    first, *more = messages(folder)
    first.weights_hash = weights_hash
    return [first, *more]


async def test_a_worker_that_comes_later_takes_what_the_first_one_reads_out(
    worker: Peer, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, which has a cache of its own."""
    done = await worker.control.SendWeights(iter(messages(other)))
    pieces = await read(worker, done.identity.weights_hash)
    assert pieces == read_out(other, done.identity.weights_hash)
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache of another machine"))
    async with another_worker(tmp_path / "present") as later:
        taken = await later.control.SendWeights(iter(pieces))
        assert taken.is_new and taken.identity == done.identity
        assert await read(later, done.identity.weights_hash) == pieces
    assert left_behind() == []


async def test_files_are_kept_until_no_worker_of_the_machine_computes_with_them(
    worker: Peer, other: Path, tmp_path: Path
) -> None:
    done = await worker.control.SendWeights(iter(messages(other)))
    kept = left_behind()
    async with another_worker(tmp_path / "present") as second, another_worker(tmp_path / "present", "third") as third:
        await second.control.SendWeights(iter(messages(other)))
        loaded = await third.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(sent_hash=done.identity.weights_hash))
        assert loaded.is_new and loaded.identity == done.identity
        assert left_behind() == kept, "one copy is enough"
        await worker.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(folder=str(tmp_path / "present")))
        assert left_behind() == kept, "two of them use it still"
        with pytest.raises(grpc.aio.AioRpcError) as none:
            await read(worker, done.identity.weights_hash)
        assert none.value.code() is grpc.StatusCode.NOT_FOUND
        assert await read(third, done.identity.weights_hash) == read_out(other, done.identity.weights_hash)
    assert left_behind() == []


async def test_what_is_read_out_stays_whole_when_the_weights_are_replaced(worker: Peer, other: Path, tmp_path: Path) -> None:
    done = await worker.control.SendWeights(iter(messages(other)))
    pieces = worker.worker._weights.read(done.identity.weights_hash)
    got = [(await anext(pieces)).piece]
    await worker.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(folder=str(tmp_path / "present")))
    assert left_behind(), "they are read"
    got += [message.piece async for message in pieces]
    assert got == read_out(other, done.identity.weights_hash)
    assert left_behind() == []


async def test_a_reader_that_leaves_holds_nothing(worker: Peer, other: Path, tmp_path: Path) -> None:
    done = await worker.control.SendWeights(iter(messages(other)))
    call = worker.control.ReadWeights(worker_pb2.ReadWeightsRequest(weights_hash=done.identity.weights_hash))
    await anext(aiter(call))
    call.cancel()
    await worker.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(folder=str(tmp_path / "present")))
    await eventually(lambda: not left_behind())


async def test_a_worker_finds_after_a_crash_what_was_sent(worker: Peer, other: Path, tmp_path: Path) -> None:
    done = await worker.control.SendWeights(iter(messages(other)))
    [kept] = left_behind()
    shutil.copytree(kept, tmp_path / "left", symlinks=True)
    await worker.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(folder=str(tmp_path / "present")))
    assert left_behind() == []
    (tmp_path / "left").rename(kept)  # nobody holds it
    again = await worker.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(sent_hash=done.identity.weights_hash))
    assert again.is_new and again.identity == done.identity
    assert left_behind() == [kept]


async def test_files_of_other_weights_than_were_asked_for_are_not_taken(worker: Peer, other: Path, tmp_path: Path) -> None:
    """On the way, and in what the machine keeps: that is removed, and a peer is asked."""
    before = worker.info.identity.weights_hash
    sent = messages(other)
    sent[0].weights_hash = "others"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.control.SendWeights(iter(sent))
    error = error_from_rpc(refused.value)
    assert (error.code, error.field) == (grpc.StatusCode.FAILED_PRECONDITION, "weights_hash")
    kept = cache_folder() / "received" / "sent-expected"
    shutil.copytree(other, kept)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(sent_hash="expected"))
    error = error_from_rpc(refused.value)
    assert (error.code, error.field) == (grpc.StatusCode.NOT_FOUND, "sent_hash")
    assert left_behind() == [] and worker.info.identity.weights_hash == before


async def test_a_try_that_fails_leaves_what_the_machine_keeps(worker: Peer, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = cache_folder() / "received" / f"sent-{load_tiny(other).loaded.weights_hash}"
    shutil.copytree(other, kept)
    request = worker_pb2.UpdateWeightsRequest(sent_hash=kept.name.removeprefix("sent-"))

    async def fail(folder: str) -> object:
        raise MemoryError(folder)

    with monkeypatch.context() as broken, pytest.raises(grpc.aio.AioRpcError):
        broken.setattr(worker.worker._weights._engine, "load_weights", fail)
        await worker.control.UpdateWeights(request)
    assert left_behind() == [kept]
    assert (await worker.control.UpdateWeights(request)).is_new


async def test_what_was_asked_for_first_and_came_last_is_not_taken(worker: Peer, other: Path, tmp_path: Path) -> None:
    """A stream that a router passes on for minutes, and newer weights meanwhile."""
    newer, goes_on = make_tiny_model(tmp_path / "newer", seed=6), asyncio.Event()

    async def slowly() -> AsyncIterator[Sent]:
        for number, message in enumerate(messages(other)):
            if number:
                await goes_on.wait()
            yield message

    old = asyncio.ensure_future(worker.control.SendWeights(slowly()))
    await eventually(lambda: bool(left_behind()))
    done = await worker.control.UpdateWeights(worker_pb2.UpdateWeightsRequest(folder=str(newer)))
    goes_on.set()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await old
    assert refused.value.code() is grpc.StatusCode.ABORTED
    assert worker.info.identity == done.identity and left_behind() == []


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (worker_pb2.UpdateWeightsRequest(), grpc.StatusCode.INVALID_ARGUMENT, "folder"),
        (worker_pb2.UpdateWeightsRequest(folder="a", sent_hash="b"), grpc.StatusCode.INVALID_ARGUMENT, "sent_hash"),
        (worker_pb2.UpdateWeightsRequest(sent_hash="unknown"), grpc.StatusCode.NOT_FOUND, "sent_hash"),
        (worker_pb2.UpdateWeightsRequest(sent_hash="../present"), grpc.StatusCode.NOT_FOUND, "sent_hash"),
        (worker_pb2.UpdateWeightsRequest(sent_hash="x" * 5000), grpc.StatusCode.NOT_FOUND, "sent_hash"),
        (worker_pb2.UpdateWeightsRequest(sent_hash="a\0b"), grpc.StatusCode.NOT_FOUND, "sent_hash"),
    ],
)
async def test_which_weights_is_validated(
    worker: Peer, request_: worker_pb2.UpdateWeightsRequest, code: grpc.StatusCode, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.control.UpdateWeights(request_)
    error = error_from_rpc(refused.value)
    assert (error.code, error.field) == (code, field)


@pytest.mark.parametrize("weights_hash", ["", "unknown", "../x", "x" * 5000])
async def test_weights_that_are_not_kept_are_not_read_out(worker: Peer, weights_hash: str) -> None:
    """Nor those that the worker was started with, which have no name here."""
    for asked in (weights_hash, worker.info.identity.weights_hash):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(worker, asked)
        assert error_from_rpc(refused.value).code is grpc.StatusCode.NOT_FOUND


def changed(messages: Sequence[Sent], index: int, **fields: object) -> list[Sent]:
    copies = [Sent.FromString(each.SerializeToString()) for each in messages]
    for name, value in fields.items():
        setattr(copies[index], name, value)
    return copies


def named(name: str) -> Callable[[Sequence[Sent]], list[Sent]]:
    return lambda sent: changed(sent, 0, file=name)


WRONG: dict[str, tuple[str, Callable[[Sequence[Sent]], Sequence[Sent]]]] = {
    "no message": ("num_bytes", lambda sent: []),
    "no size": ("num_bytes", lambda sent: changed(sent, 0, num_bytes=0)),
    "absurd size": ("num_bytes", lambda sent: changed(sent, 0, num_bytes=1 << 60)),
    "too few bytes": ("data", lambda sent: changed(sent, 0, num_bytes=sent[0].num_bytes + 1)),
    "too many bytes": ("data", lambda sent: changed(sent, 0, num_bytes=sent[0].num_bytes - 1)),
    "cut off": ("sha256", lambda sent: sent[:-1]),
    "damaged": ("sha256", lambda sent: changed(sent, -1, sha256=hashlib.sha256(b"").digest())),
    "short hash": ("sha256", lambda sent: changed(sent, -1, sha256=b"abc")),
    "hash too early": ("sha256", lambda sent: [*sent, Sent(sha256=b"x" * 32)]),
    "no name": ("file", named("")),
    "twice": ("file", lambda sent: [*sent[:-1], Sent(file=sent[0].file), sent[-1]]),
    "another folder": ("file", named("../model.safetensors")),
    "a folder": ("file", named("a/b.safetensors")),
    "another file": ("file", named("config.json")),
    "hidden": ("file", named(".safetensors")),
    "pickles": ("file", named("model.bin")),
    "zero": ("file", named("x\0.safetensors")),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_wrong_is_named(worker: Peer, other: Path, what: str) -> None:
    field, change = WRONG[what]
    before = worker.info.identity.weights_hash
    error = await refused(worker, change(messages(other)))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert worker.info.identity.weights_hash == before


async def test_files_that_are_no_weights_are_refused_by_the_loader(worker: Peer) -> None:
    data = b"these are no tensors"
    sent = [Sent(num_bytes=len(data), file="model.safetensors", data=data), Sent(sha256=hashlib.sha256(data).digest())]
    error = await refused(worker, sent)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "folder")


async def test_a_full_disk_is_named(worker: Peer, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    error = await refused(worker, messages(other))
    assert (error.code, "no room" in error.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


async def test_a_sender_that_leaves_leaves_nothing(worker: Peer, other: Path) -> None:
    async def some() -> AsyncIterator[Sent]:
        yield messages(other)[0]
        raise RuntimeError("the sender died")

    with pytest.raises((RuntimeError, grpc.aio.AioRpcError, asyncio.CancelledError)):
        await worker.control.SendWeights(some())
    await eventually(lambda: not left_behind())


async def test_of_weights_that_are_coming_no_second_stream_is_taken(worker: Peer, other: Path) -> None:
    """As routers pass on those of a worker that has come, each for itself."""
    pieces = messages(other)
    pieces[0].weights_hash = load_tiny(other).loaded.weights_hash
    may_end = asyncio.Event()

    async def slowly() -> AsyncIterator[Sent]:
        yield pieces[0]
        await may_end.wait()
        for piece in pieces[1:]:
            yield piece

    first = asyncio.create_task(_sent(worker, slowly()))
    await eventually(lambda: len(left_behind()) == 1)
    with pytest.raises(grpc.aio.AioRpcError, match="are coming already") as caught:
        await worker.control.SendWeights(iter(pieces))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and len(left_behind()) == 1
    may_end.set()
    assert (await first).identity.weights_hash == pieces[0].weights_hash
    assert not (await worker.control.SendWeights(iter(pieces))).is_new


async def _sent(worker: Peer, pieces: AsyncIterator[Sent]) -> worker_pb2.UpdateWeightsResponse:
    return await worker.control.SendWeights(pieces)


async def test_a_model_of_one_file_takes_none(model: Model, other: Path, tmp_path: Path) -> None:
    async with running_worker(model, worker_id="g") as peer:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"")
        peer.worker._weights._model = str(file)
        error = await refused(peer, messages(other))
        assert (error.code, error.field) == (grpc.StatusCode.FAILED_PRECONDITION, "file")


def test_what_was_abandoned_is_removed(cache: Path) -> None:
    old, young = cache / "received" / "weights-old", cache / "received" / "weights-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    received._remove_abandoned(cache / "received")
    assert left_behind() == [young]
    young.rmdir()


def test_what_is_held_is_not_abandoned_however_old(cache: Path) -> None:
    held, left = cache / "received" / "sent-held", cache / "received" / "sent-left"
    for folder in (held, left):
        folder.mkdir(parents=True)
        os.utime(folder, (1, 1))
    kept = received.KeptWeights.find("held")
    assert kept is not None
    received._remove_abandoned(cache / "received")
    assert left_behind() == [held]
    kept.release()
    kept.release()
    assert left_behind() == []
    assert received.KeptWeights.find("held") is None


def test_a_folder_without_weights_is_refused_by_the_client(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no .safetensors files"):
        files_of(tmp_path)
