"""The engines that the contract is tested on, with a tiny model each."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import load_model
from pdmesh.worker.engines.builtin import BuiltinEngine
from tests.support.tiny_models import make_tiny_model
from tests.support.worker_mesh import Model, load_tiny
from tests.worker.engines.harness import Opened, opened


class Kind(Protocol):
    """One kind of engine."""

    folder: Path

    def open(self) -> AbstractAsyncContextManager[Opened]:
        """Open an engine; at the end it must be whole."""

    def open_two(self) -> AbstractAsyncContextManager[tuple[Opened, Opened]]:
        """Open engines that prefill and that decode; it may be the same one."""

    def open_with_adapters(self) -> AbstractAsyncContextManager[Opened]:
        """Open an engine that has a single place for LoRA adapters."""

    def close(self) -> None: ...


class Builtin:
    """Our own engine, on the torch backend."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_tiny_model(folder / "model")
        self._model = load_tiny(self.folder)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Opened]:
        engine = BuiltinEngine(self._model.engine())
        try:
            async with opened(engine) as it:
                yield it
        finally:
            engine.close()

    @asynccontextmanager
    async def open_two(self) -> AsyncIterator[tuple[Opened, Opened]]:
        async with self.open() as prefill, self.open() as decode:
            yield prefill, decode

    @asynccontextmanager
    async def open_with_adapters(self) -> AsyncIterator[Opened]:
        config = EngineConfig(model=str(self.folder), num_blocks=128, backend="torch", max_loras=1)
        engine = BuiltinEngine(Model(self.folder, load_model(config)).engine(max_loras=1))
        try:
            async with opened(engine) as it:
                yield it
        finally:
            engine.close()

    def close(self) -> None:
        return


class Vllm:
    """vLLM: one for all tests, because a process can have but one with the worker half of a KV connector."""

    num_ranks = 1

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed here: make test-vllm runs this with it")
        os.environ.update(ENVIRONMENT)
        from pdmesh_vllm.engine import VllmEngine
        from pdmesh_vllm.loading import load_core

        self.folder = make_tiny_model(folder / "model", head_dim=32)  # a multiple of 32: its CPU kernels' demand
        self.engine = VllmEngine(load_core(self.arguments()), max_adapters=1)
        self.engine.calibrate()

    def arguments(self) -> dict[str, object]:
        sizes = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64}
        pool = {"block_size": 32, "num_gpu_blocks_override": 65}
        lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8}
        fast = {"enforce_eager": True, "skip_tokenizer_init": True}
        ranks = {"tensor_parallel_size": self.num_ranks, "distributed_executor_backend": "mp"} if self.num_ranks > 1 else {}
        return {"model": str(self.folder), "dtype": "float32", **sizes, **pool, **lora, **fast, **ranks}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Opened]:
        async with opened(self.engine) as it:
            yield it
        self.engine.core.check_integrity()  # no step runs any more

    @asynccontextmanager
    async def open_two(self) -> AsyncIterator[tuple[Opened, Opened]]:
        async with self.open() as it:
            yield it, it

    def open_with_adapters(self) -> AbstractAsyncContextManager[Opened]:
        return self.open()

    def close(self) -> None:
        self.engine.close()


class VllmInTwo(Vllm):
    """vLLM with a process for each half of the model's heads."""

    num_ranks = 2


ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ENGINES: Mapping[str, Callable[[Path], Kind]] = {"pdmesh": Builtin, "vllm": Vllm, "vllm-two-ranks": VllmInTwo}
