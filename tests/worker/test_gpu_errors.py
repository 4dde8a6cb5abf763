"""What only a GPU refuses, said in one line. No machine of these tests has one, so its words are given."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.process import Lifecycle
from pdmesh.worker import main
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines import builtin

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it."


def refusal(monkeypatch: pytest.MonkeyPatch, device: str, said: Exception) -> str:
    def refuse(*_: object) -> None:
        raise said

    monkeypatch.setattr(builtin, "load_model", refuse)
    with pytest.raises((ConfigError, RuntimeError)) as refused:
        asyncio.run(main._load_engine(Lifecycle(), WorkerConfig(engine=EngineConfig(model=str(Path.cwd()), device=device))))
    assert isinstance(refused.value, ConfigError) == (device == "cuda")
    return str(refused.value)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            torch.OutOfMemoryError(OUT_OF_MEMORY),
            "--kv-memory-share: the GPU's memory does not suffice: CUDA out of memory. Tried",
        ),
        (
            RuntimeError("Failed to find C compiler."),
            "--device: cuda: RuntimeError: Failed to find C compiler.; see the log above",
        ),
        (RuntimeError(), "--device: cuda: RuntimeError: RuntimeError; see"),
    ],
)
def test_one_line_names_the_flag(monkeypatch: pytest.MonkeyPatch, said: Exception, shown: str) -> None:
    line = refusal(monkeypatch, "cuda", said)
    assert line.startswith(shown)
    assert "\n" not in line


def test_on_a_cpu_it_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, "cpu", RuntimeError("wrong")) == "wrong"
