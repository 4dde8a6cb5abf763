"""Engines of several ranks, each a real process; none may be left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.parallel.model import ParallelModel
from tests.support.forked_processes import ForkServers
from tests.support.mock_engine import hash_block
from tests.support.tiny_models import make_tiny_model

EXECUTED = {"test_faults", "test_group", "test_ranks_staging"}
"""Here ranks are started as a worker starts them, and import everything for themselves."""


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServers]:
    """It imports torch once for all ranks."""
    with ForkServers(1) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Except in EXECUTED."""
    if request.path.stem in EXECUTED:
        yield
        return
    with request.getfixturevalue("fork_server").used_for_ranks():
        yield


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four KV heads; llama has biases behind its sums, a tied head and a vocabulary that two do not divide."""
    more: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "vocab_size": 321, "tie_word_embeddings": True}
    own = more if request.param == "llama" else {}
    path = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(path, request.param, num_attention_heads=8, num_key_value_heads=4, head_dim=16, **own)


def config_of(folder: Path, tensor_parallel: int, **settings: object) -> EngineConfig:
    given = {"num_blocks": 128, "max_num_batched_tokens": 64, "num_threads": 1, "speculation": "none", **settings}
    return EngineConfig(str(folder), backend="torch", dtype="float32", tensor_parallel=tensor_parallel, **given)  # type: ignore[arg-type]


@contextmanager
def running(config: EngineConfig) -> Iterator[Engine]:
    """An engine; its ranks are gone in the end, whatever happened."""
    num_threads = torch.get_num_threads()
    loaded = load_model(config)
    pids = loaded.model.ranks.pids if isinstance(loaded.model, ParallelModel) else ()
    assert len(pids) == config.tensor_parallel - 1
    engine = Engine(config, hash_block=hash_block, loaded=loaded)
    try:
        yield engine
    finally:
        engine.close()
        torch.set_num_threads(num_threads)
        assert not any(is_alive(pid) for pid in pids)


def pids_of(engine: Engine) -> tuple[int, ...]:
    model = engine.versions.current.model
    assert isinstance(model, ParallelModel)
    return model.ranks.pids


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
