"""Adapters of workers: loaded while they serve, computed on either side of a hand-off, and never mixed up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import load_model
from pdmesh.v1 import common_pb2, prefill_pb2, worker_pb2
from tests.engine.test_model_transformers import greedy, reference
from tests.support.adapters import make_adapter, merge
from tests.support.mini_router import MiniRouter
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, running_worker, token_request

pytest.importorskip("transformers")
PROMPT = [10 + (7 * i) % 200 for i in range(53)]
NUM_TOKENS = 12


@dataclass(frozen=True)
class Scene:
    """A model, two adapters of it, and what each answers to PROMPT (0: the model alone)."""

    folder: Path
    adapters: dict[str, Path]
    answers: dict[str, list[int]]

    def model(self) -> Model:
        """The model loaded with places for adapters, for one worker alone."""
        torch.set_num_threads(1)
        config = EngineConfig(model=str(self.folder), num_blocks=128, backend="torch", max_loras=2)
        return Model(self.folder, load_model(config))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = make_tiny_model(tmp_path_factory.mktemp("adapted"))
    parent = tmp_path_factory.mktemp("adapters")
    adapters = {name: make_adapter(parent / name, reference(folder), "all-linear", seed=n) for n, name in enumerate("ab")}
    answers = {name: greedy(merge(reference(folder), path), PROMPT, NUM_TOKENS) for name, path in adapters.items()}
    return Scene(folder, adapters, {**answers, "": greedy(reference(folder), PROMPT, NUM_TOKENS)})


@dataclass(frozen=True)
class Pair:
    prefill: Peer
    decode: Peer
    router: MiniRouter


@pytest.fixture
async def pair(scene: Scene) -> AsyncIterator[Pair]:
    engine: dict[str, object] = {"max_loras": 2}
    async with (
        running_worker(scene.model(), engine=engine, roles=("prefill",), worker_id="p") as prefiller,
        running_worker(scene.model(), engine=engine, roles=("decode",), worker_id="d") as decoder,
    ):
        router = MiniRouter()
        await router.attach(decoder)
        yield Pair(prefiller, decoder, router)
        await router.detach()


def load(name: str, folder: Path, **fields: str) -> worker_pb2.LoadAdapterRequest:
    return worker_pb2.LoadAdapterRequest(name=name, folder=str(folder), **fields)


def asked(adapter: str, digest: str = "", prompt: list[int] = PROMPT, max_tokens: int = NUM_TOKENS) -> common_pb2.TokenRequest:
    request = token_request(prompt, max_tokens=max_tokens)
    request.adapter, request.adapter_digest = adapter, digest
    return request


async def both_load(pair: Pair, scene: Scene, *names: str) -> dict[str, str]:
    """Load adapters on both workers; return their digests. On decode in the other order, so that their slots differ."""
    for name in names:
        await pair.prefill.control.LoadAdapter(load(name, scene.adapters[name]))
    return {name: (await pair.decode.control.LoadAdapter(load(name, scene.adapters[name]))).digest for name in reversed(names)}


async def test_what_a_worker_offers_follows(pair: Pair, scene: Scene) -> None:
    control = pair.decode.control
    assert (pair.decode.info.max_adapters, list(pair.decode.info.adapters)) == (2, [])
    loaded = await control.LoadAdapter(load("a", scene.adapters["a"]))
    assert (loaded.name, loaded.rank, len(loaded.digest)) == ("a", 8, 64)
    assert await control.LoadAdapter(load("a", scene.adapters["a"], digest=loaded.digest)) == loaded
    assert list(pair.decode.info.adapters) == [loaded]
    assert list(pair.decode.worker.load.report().adapters) == [loaded]
    assert list((await control.ListAdapters(worker_pb2.ListAdaptersRequest())).adapters) == [loaded]
    await control.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="a"))
    assert list(pair.decode.worker.load.report().adapters) == []


async def test_a_change_is_reported_at_once(pair: Pair, scene: Scene) -> None:
    watch = pair.decode.control.Watch(worker_pb2.WatchRequest(period_ms=10_000))
    report = await watch.read()
    assert isinstance(report, worker_pb2.LoadReport) and not report.adapters
    await pair.decode.control.LoadAdapter(load("a", scene.adapters["a"]))
    report = await watch.read()
    assert isinstance(report, worker_pb2.LoadReport) and [each.name for each in report.adapters] == ["a"]
    watch.cancel()


async def test_both_sides_of_a_hand_off_compute_the_adapter(pair: Pair, scene: Scene) -> None:
    digests = await both_load(pair, scene, "a", "b")
    for name in ("a", "b", ""):
        seen, outcome = await pair.router.generate(pair.prefill, pair.decode, f"r{name}", asked(name, digests.get(name, "")))
        assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED
        assert seen.output() == scene.answers[name], name
        assert seen.started is not None and seen.started.num_cached_tokens == 0
    seen, _ = await pair.router.generate(pair.prefill, pair.decode, "again", asked("a"))
    assert seen.output() == scene.answers["a"]
    assert seen.started is not None and seen.started.num_cached_tokens == 48


async def test_local_requests_of_all_in_one_batch(pair: Pair, scene: Scene) -> None:
    await both_load(pair, scene, "a", "b")
    for name in ("a", "", "b"):
        await pair.router.submit(pair.decode, f"r{name}", asked(name), mode=LOCAL)
    for name in ("a", "", "b"):
        await pair.router.until_finished(f"r{name}")
        assert pair.router.of(f"r{name}").output() == scene.answers[name]


async def test_kv_of_another_adapter_is_not_taken(pair: Pair, scene: Scene) -> None:
    await both_load(pair, scene, "a", "b")
    reservation = await pair.router.submit(pair.decode, "r1", asked("a"))
    assert reservation.adapter == "a" and reservation.adapter_digest
    for wrong in ("b", ""):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pair.router.prefill(pair.prefill, pair.decode, "r1", asked(wrong), reservation)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "the blocks are for a" in str(refused.value.details())
    await pair.router.prefill(pair.prefill, pair.decode, "r1", asked("a"), reservation)
    await pair.router.until_finished("r1")
    assert pair.router.of("r1").output() == scene.answers["a"]


async def test_unloading_lets_running_requests_end(pair: Pair, scene: Scene) -> None:
    await both_load(pair, scene, "a")
    request = asked("a", max_tokens=300)
    await pair.router.submit(pair.decode, "r1", request, mode=LOCAL)
    await eventually(lambda: len(pair.router.of("r1").output()) > 3)
    answer = await pair.decode.control.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="a"))
    assert answer.num_running == 1
    with pytest.raises(grpc.aio.AioRpcError, match="adapter 'a' is not loaded on this worker"):
        await pair.router.submit(pair.decode, "r2", asked("a"), mode=LOCAL)
    await pair.router.until_finished("r1")
    assert pair.router.of("r1").output()[:NUM_TOKENS] == scene.answers["a"]
    await eventually(lambda: not pair.decode.engine.adapters.slots)


REFUSED: dict[str, tuple[Callable[[Scene], worker_pb2.LoadAdapterRequest], grpc.StatusCode, str]] = {
    "no name": (lambda s: load("", s.adapters["a"]), grpc.StatusCode.INVALID_ARGUMENT, "is not 1 to 128"),
    "the model's name": (lambda s: load("tiny", s.adapters["a"]), grpc.StatusCode.INVALID_ARGUMENT, "the model's own name"),
    "no folder": (lambda s: worker_pb2.LoadAdapterRequest(name="a"), grpc.StatusCode.INVALID_ARGUMENT, "empty; give the folder"),
    "nothing there": (lambda s: load("a", s.folder), grpc.StatusCode.INVALID_ARGUMENT, "adapter 'a': .*no adapter_config.json"),
    "other files": (lambda s: load("a", s.adapters["a"], digest="0" * 64), grpc.StatusCode.FAILED_PRECONDITION, "other files"),
    "another model": (
        lambda s: load("a", s.adapters["a"], model="m"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "serves 'tiny', not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals(pair: Pair, scene: Scene, name: str) -> None:
    make, code, message = REFUSED[name]
    with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
        await pair.decode.control.LoadAdapter(make(scene))
    assert refused.value.code() is code
    assert not pair.decode.info.adapters


async def test_full_places_and_unknown_names(pair: Pair, scene: Scene) -> None:
    control = pair.decode.control
    await both_load(pair, scene, "a", "b")
    with pytest.raises(grpc.aio.AioRpcError, match="adapter 'c': all 2 places are taken"):
        await control.LoadAdapter(load("c", scene.adapters["a"]))
    with pytest.raises(grpc.aio.AioRpcError, match="'a' is loaded with other weights"):
        await control.LoadAdapter(load("a", scene.adapters["b"]))
    with pytest.raises(grpc.aio.AioRpcError, match="adapter 'x' is not loaded") as refused:
        await control.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="x"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError, match="adapter 'a' has other weights on this worker"):
        await pair.router.submit(pair.decode, "r1", asked("a", "0" * 64), mode=LOCAL)


async def test_a_worker_without_places(decoder: Peer, scene: Scene, router: MiniRouter) -> None:
    assert decoder.info.max_adapters == 0
    with pytest.raises(grpc.aio.AioRpcError, match="no places for adapters; start it with --max-loras 8"):
        await decoder.control.LoadAdapter(load("a", scene.adapters["a"]))
    with pytest.raises(grpc.aio.AioRpcError, match="adapter 'a' is not loaded on this worker"):
        await router.submit(decoder, "r1", asked("a"), mode=LOCAL)
