"""Two services on the Triton kernels, their KV staged as that of a GPU: gathered, sent, scattered, and decoded to equal tokens.

Without a GPU all of it runs in Triton's interpreter, over a pool in CPU memory that transports are not shown.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.staging import StagedMemory
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.triton.blocks import TritonBlocks
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kv_cache.cuda_ipc import CudaSharing, PoolSharing
from pdmesh.engine.kv_cache.staging import StagingSizes
from pdmesh.engine.kv_cache.streams import streams_of
from pdmesh.engine.loader.loader import load_model
from pdmesh.v1 import prefill_pb2
from pdmesh.worker.kv_memory import stage
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.kernels.triton.test_fp8_kv import SCALES, with_scales
from tests.support.host_sharing import HostSharing
from tests.support.mini_router import MiniRouter
from tests.support.tiny_models import make_tiny_model
from tests.support.worker_mesh import Model, Peer, only_transport, reference, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(53)]


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps where it is in globals; a GPU takes launches from several threads."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def locked(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", locked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def loaded(folder: Path, backend: str, kv_dtype: str = "auto") -> Model:
    """A model of one engine: graphs are of one pool."""
    torch.set_num_threads(1)
    settings = {"num_blocks": 128, "backend": backend, "dtype": "float32", "device": DEVICE, "kv_dtype": kv_dtype}
    return Model(folder, load_model(EngineConfig(model=str(folder), **settings)))  # type: ignore[arg-type]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way KV was moved."""
    calls: list[str] = []
    for name in ("gather", "scatter"):
        move = getattr(TritonBlocks, name)

        def noted(self: Any, *args: Any, name: str = name, move: Any = move, **kwargs: Any) -> None:
            calls.append(name)
            move(self, *args, **kwargs)

        monkeypatch.setattr(TritonBlocks, name, noted)
    return calls


def staged(engine: Engine) -> StagedMemory:
    """In two pieces each way, of two blocks of a layer."""
    small = StagingSizes(num_pieces=2, piece_bytes=4 * engine.kv.bytes_per_layer_block)
    return stage(engine, streams_of(engine.kv.tensor.device), small, small)


def shown(engine: Engine) -> StagedMemory:
    """That, and as a device shows it to others; without a GPU shared memory stands for its."""
    device = engine.kv.tensor.device
    sharing: PoolSharing = CudaSharing(device) if DEVICE == "cuda" else HostSharing(engine.kv.fd)
    small = StagingSizes(num_pieces=2, piece_bytes=4 * engine.kv.bytes_per_layer_block)
    return stage(engine, streams_of(device), small, small, sharing)


@asynccontextmanager
async def two_workers(
    folder: Path,
    backend: str,
    *,
    prefill: bool = True,
    decode: bool = True,
    kv_dtypes: tuple[str, str] = ("auto", "auto"),
    way: Callable[[Engine], StagedMemory] = staged,
) -> AsyncIterator[tuple[Peer, Peer, MiniRouter]]:
    """`prefill`, `decode`: its pool is staged, in this way; otherwise transports see it. `kv_dtypes`: of prefill's pool and of
    decode's."""
    small: dict[str, object] = {"num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 4, "device": DEVICE}
    ways: list[dict[str, Any]] = [{"engine": small, "stage": way if each else None} for each in (prefill, decode)]
    async with (
        running_worker(loaded(folder, backend, kv_dtypes[0]), roles=("prefill",), worker_id="p", **ways[0]) as prefiller,
        running_worker(loaded(folder, backend, kv_dtypes[1]), roles=("decode",), worker_id="d", **ways[1]) as decoder,
    ):
        router = MiniRouter()
        await router.attach(decoder)
        yield prefiller, decoder, router
        await router.detach()


async def test_tokens_equal_one_engine(folder: Path, launched: list[str]) -> None:
    """Chunks, a last block filled in part; all of it on the kernels."""
    request = token_request(PROMPT[:37], max_tokens=2)
    expected = reference(loaded(folder, "torch"), request)[0]
    async with two_workers(folder, "triton") as (prefiller, decoder, router):
        launched.clear()  # what was warmed up
        assert isinstance(prefiller.engine.versions.current.model, TritonModel)
        _, outcome = await router.generate(prefiller, decoder, "r1", request)
        await router.until_finished("r1")
        assert outcome.transport == "tcp"
    assert router.of("r1").output() == expected
    assert launched.count("gather") >= 3 and launched.count("scatter") >= 3


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_what_decode_holds_is_not_sent_again(folder: Path, transport: str, launched: list[str]) -> None:
    requests = {
        "r1": token_request(PROMPT),
        "r2": token_request([*PROMPT[:40], *range(100, 117)], temperature=0.9, n=2),
    }
    own = loaded(folder, "torch")
    expected = {name: reference(own, request) for name, request in requests.items()}
    num_bytes = []
    async with two_workers(folder, "torch") as (prefiller, decoder, router):
        launched.clear()
        for name, request in requests.items():
            reservation = await router.submit(decoder, name, request)
            _, outcome = await router.prefill(prefiller, decoder, name, request, only_transport(reservation, transport))
            assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED, outcome
            assert outcome.transport == transport
            num_bytes.append(outcome.kv_bytes)
            await router.until_finished(name, request.sampling.n)
    outputs = {name: [router.of(name).output(choice) for choice in range(len(each))] for name, each in expected.items()}
    assert outputs == expected
    assert 0 < num_bytes[1] < num_bytes[0]
    assert launched.count("gather") >= 5 and launched.count("scatter") >= 5


@pytest.mark.skipif(DEVICE == "cuda", reason="a process does not open its own pool; tests/kvtransfer/test_processes.py has two")
async def test_one_device_reads_what_the_other_shows(folder: Path, launched: list[str]) -> None:
    """Sums and conditional scatters on the kernels; nothing is staged, chunks and a prefix that decode holds."""
    requests = {"r1": token_request(PROMPT), "r2": token_request([*PROMPT[:40], *range(100, 117)], temperature=0.9, n=2)}
    own = loaded(folder, "torch")
    expected = {name: reference(own, request) for name, request in requests.items()}
    num_bytes = []
    async with two_workers(folder, "torch", way=shown) as (prefiller, decoder, router):
        launched.clear()
        for name, request in requests.items():
            _, outcome = await router.generate(prefiller, decoder, name, request)
            assert outcome.transport == "cuda_ipc"
            num_bytes.append(outcome.kv_bytes)
            await router.until_finished(name, request.sampling.n)
    outputs = {name: [router.of(name).output(choice) for choice in range(len(each))] for name, each in expected.items()}
    assert outputs == expected
    assert 0 < num_bytes[1] < num_bytes[0]
    assert launched == []


@pytest.mark.skipif(DEVICE == "cuda", reason="the other worker's pool is to be in CPU memory")
@pytest.mark.parametrize("sender", [True, False], ids=["to the host", "from the host"])
async def test_between_a_staged_pool_and_one_that_is_not(folder: Path, sender: bool, launched: list[str]) -> None:
    request = token_request(PROMPT)
    expected = reference(loaded(folder, "torch"), request)[0]
    async with two_workers(folder, "torch", prefill=sender, decode=not sender) as (prefiller, decoder, router):
        launched.clear()
        _, outcome = await router.generate(prefiller, decoder, "r1", request)
        await router.until_finished("r1")
        assert outcome.transport == ("tcp" if sender else "shm")  # nobody can map what is staged; who has it can map others'
    assert router.of("r1").output() == expected
    assert set(launched) == {"gather" if sender else "scatter"}


def whole_blocks(kv: Tensor, num_tokens: int) -> dict[bytes, Tensor]:
    """Blocks [layers, 2, block_size, heads, head_dim] all of whose tokens have been written, by what they hold."""
    blocks = kv.transpose(0, 2).transpose(1, 2).cpu()
    written = [block for block in blocks.contiguous() if block.float().abs().sum((0, 1, 3, 4)).all()]
    assert len(written) == num_tokens // kv.shape[3]
    return {block.contiguous().view(torch.uint8).numpy().tobytes(): block for block in written}


@pytest.mark.parametrize("staging", [True, False], ids=["staged", "seen by transports"])
@pytest.mark.parametrize("kv_dtypes", [("fp8", "fp8"), ("fp8", "auto"), ("auto", "fp8")], ids="-".join)
async def test_keys_and_values_in_fp8(tmp_path: Path, kv_dtypes: tuple[str, str], staging: bool) -> None:
    """As they lie between two pools in fp8, with the tokens of one engine; otherwise converted, with the checkpoint's scales."""
    if DEVICE == "cuda" and not staging:
        pytest.skip("a pool on a GPU is staged")
    folder, request = with_scales(make_tiny_model(tmp_path, num_hidden_layers=2)), token_request(PROMPT[:37], max_tokens=2)
    workers = two_workers(folder, "triton", prefill=staging, decode=staging, kv_dtypes=kv_dtypes)
    async with workers as (prefiller, decoder, router):
        _, outcome = await router.generate(prefiller, decoder, "r1", request)
        await router.until_finished("r1")
        assert outcome.status == prefill_pb2.HANDOFF_STATUS_COMMITTED, outcome
        sent, arrived = (whole_blocks(peer.engine.kv.tensor, 37) for peer in (prefiller, decoder))
        names = ["float8_e4m3fn" if each == "fp8" else "float32" for each in kv_dtypes]
        assert [peer.info.layout.kv_dtype for peer in (prefiller, decoder)] == names
    assert set(arrived) == {_converted(block, kv_dtypes[1]) for block in sent.values()}
    if kv_dtypes == ("fp8", "fp8"):
        assert router.of("r1").output() == reference(loaded(folder, "triton", "fp8"), request)[0]
    assert len(router.of("r1").output()) == 2


def _converted(block: Tensor, kv_dtype: str) -> bytes:
    """By torch."""
    scales = torch.tensor(SCALES).view(2, 2, 1, 1, 1)
    if block.dtype == torch.float32 and kv_dtype == "fp8":
        block = (block / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif block.dtype != torch.float32 and kv_dtype == "auto":
        block = block.float() * scales
    return block.contiguous().view(torch.uint8).numpy().tobytes()
