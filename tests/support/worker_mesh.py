"""Workers in this process, real gRPC on loopback, and a router's side that is as small as can be."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc.aio
import torch

from kvtransfer.staging import StagedMemory
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.runtime.rpc.channel import connect
from pdmesh.text.block_hash import hash_block
from pdmesh.v1 import common_pb2, decode_pb2_grpc, mesh_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdmesh.worker.assembly import Worker
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.builtin import BuiltinEngine
from pdmesh.worker.token_request import TokenRequestTranslator
from tests.support.waiting import eventually

T = TypeVar("T")
MODEL = "tiny"
REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL
NO_FINISH = common_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True)
class Model:
    """A loaded tiny model, shared by all engines of a test session."""

    folder: Path
    loaded: LoadedModel

    def engine(self, **overrides: object) -> Engine:
        return Engine(self.engine_config(**overrides), hash_block=hash_block, loaded=self.loaded)

    def engine_config(self, **overrides: object) -> EngineConfig:
        """Small, and each step gives a sequence one token: tests interrupt answers in the middle, and count steps."""
        sizes = {"num_blocks": 128, "max_num_seqs": 16, "max_num_batched_tokens": 64}
        small = EngineConfig(model=str(self.folder), **sizes, kv_shared=True, speculation="none")  # type: ignore[arg-type]
        return replace(small, **overrides)  # type: ignore[arg-type]


def load_tiny(folder: Path, backend: str = "torch", **settings: Any) -> Model:
    torch.set_num_threads(1)
    # The native kernels finish hundreds of tokens of a tiny model before a test can interrupt them.
    return Model(folder, load_model(EngineConfig(model=str(folder), num_blocks=128, backend=backend, **settings)))


@dataclass
class Peer:
    """A running worker and stubs to it."""

    worker: Worker
    channel: grpc.aio.Channel
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decode: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(self.channel)
        self.prefill: prefill_pb2_grpc.PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(self.channel)
        self.control: worker_pb2_grpc.WorkerControlAsyncStub = worker_pb2_grpc.WorkerControlStub(self.channel)

    @property
    def engine(self) -> Engine:
        """The engine itself, behind what the worker sees of it."""
        engine = self.worker.engine
        assert isinstance(engine, BuiltinEngine)
        return engine.engine

    @property
    def info(self) -> worker_pb2.WorkerInfo:
        return self.worker.info()

    def is_whole(self) -> bool:
        """Nothing is held, all blocks are free."""
        stats = self.engine.stats()
        busy = stats.num_running + stats.num_waiting + stats.num_reserved + stats.num_held
        return busy == 0 and stats.num_free_blocks == stats.num_total_blocks

    async def until_whole(self) -> None:
        await eventually(self.is_whole)
        self.engine.check_integrity()


@asynccontextmanager
async def running_worker(
    model: Model,
    *,
    engine: dict[str, object] | None = None,
    stage: Callable[[Engine], StagedMemory | None] | None = None,
    **overrides: object,
) -> AsyncIterator[Peer]:
    """A worker; at the end it must be whole and leave no descriptor or task behind. `stage`: its KV moves as that of a device."""
    num_fds = _count_fds()
    config = WorkerConfig(engine=model.engine_config(**(engine or {})), model_name=MODEL, lease_s=5.0)
    config = replace(config, **overrides)  # type: ignore[arg-type]
    config.validate()
    failures: list[BaseException] = []
    own = model.engine(**(engine or {}))
    composed = BuiltinEngine(own, stage(own) if stage is not None else None)
    worker = Worker(config, composed, worker_id=config.worker_id or "w", on_failure=failures.append)
    description = await worker.start()
    channel = connect(description.address)
    peer = Peer(worker, channel, failures)
    try:
        yield peer
        await peer.until_whole()
        assert not failures, failures
    finally:
        await channel.close()
        await worker.stop()
    await eventually(lambda: _count_fds() <= num_fds + _GRPC_FDS)


_GRPC_FDS = 6  # gRPC's own event engine keeps a few descriptors for the life of the process


def _count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def token_request(
    prompt: Sequence[int],
    *,
    max_tokens: int = 12,
    temperature: float = 0.0,
    seed: int = 7,
    n: int = 1,
    emitted: Sequence[common_pb2.EmittedChoice] = (),
    ignore_eos: bool = True,
    stop_token_ids: Sequence[int] = (),
    logprobs: int | None = None,
) -> common_pb2.TokenRequest:
    sampling = common_pb2.SamplingParams(
        temperature=temperature,
        top_k=40 if temperature else 0,
        seed=seed,
        max_tokens=max_tokens,
        n=n,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
    )
    return common_pb2.TokenRequest(model=MODEL, prompt_token_ids=prompt, sampling=sampling, emitted=emitted)


def reference(model: Model, request: common_pb2.TokenRequest) -> list[list[int]]:
    """The tokens of one engine alone, by choice, without what was emitted before."""
    device = getattr(model.loaded.model, "device", torch.device("cpu")).type
    engine = model.engine(device=device, kv_shared=device == "cpu")
    translated = _at_once(TokenRequestTranslator(MODEL, lambda tenant, salt: b"")(request))
    tokens: list[list[int]] = [[] for _ in range(translated.sampling.n)]
    assert engine.add(replace(translated, request_id="r"))
    while (result := engine.step()) is not None:
        for update in result.updates:
            tokens[update.choice].extend(update.token_ids)
    engine.kv.close()
    return tokens


def _at_once(work: Coroutine[object, object, T]) -> T:
    """The result of what has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as ended:
        return cast("T", ended.value)
    raise AssertionError("it waits for something")


def only_transport(reservation: common_pb2.Reservation, transport: str) -> common_pb2.Reservation:
    """The reservation as a peer that knows one transport sees it."""
    narrowed = common_pb2.Reservation()
    narrowed.CopyFrom(reservation)
    del narrowed.endpoints[:]
    narrowed.endpoints.extend(endpoint for endpoint in reservation.endpoints if endpoint.transport == transport)
    return narrowed


def history(*choices: Sequence[int]) -> list[common_pb2.EmittedChoice]:
    return [common_pb2.EmittedChoice(index=index, token_ids=tokens) for index, tokens in enumerate(choices)]
