"""The engines that the contract is tested on, with a tiny model each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import load_model
from pdmesh.worker.engines.base import WorkerEngine
from pdmesh.worker.engines.builtin import BuiltinEngine
from tests.support.tiny_models import make_tiny_model
from tests.support.worker_mesh import Model, load_tiny


class Kind(Protocol):
    """One kind of engine."""

    folder: Path

    def make(self, **settings: object) -> WorkerEngine: ...

    def with_adapters(self) -> WorkerEngine | None:
        """One that has a single place for LoRA adapters; None: there is no such engine of this kind."""

    def close(self) -> None: ...


class Builtin:
    """Our own engine, on the torch backend."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_tiny_model(folder / "model")
        self._model = load_tiny(self.folder)

    def make(self, **settings: object) -> WorkerEngine:
        return BuiltinEngine(self._model.engine(**settings))

    def with_adapters(self) -> WorkerEngine:
        config = EngineConfig(model=str(self.folder), num_blocks=128, backend="torch", max_loras=1)
        return BuiltinEngine(Model(self.folder, load_model(config)).engine(max_loras=1))

    def close(self) -> None:
        return


ENGINES: Mapping[str, Callable[[Path], Kind]] = {"pdmesh": Builtin}
