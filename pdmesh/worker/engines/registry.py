"""The engines by name. Each is imported when it is asked for, because the packages of another may be missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pdmesh.engine.loader.builder import Progress
    from pdmesh.worker.config import WorkerConfig
    from pdmesh.worker.engines.base import WorkerEngine

LoadEngine = Callable[["WorkerConfig", "Progress"], "WorkerEngine"]
"""Load an engine, on a thread of its own. Raises ValueError ("field: what is wrong"), OSError or MemoryError."""

ENGINES: Mapping[str, str] = {"pdmesh": "pdmesh.worker.engines.builtin:load_engine"}


def load_engine(config: WorkerConfig, progress: Progress) -> WorkerEngine:
    """Load the engine that the configuration names."""
    module, function = ENGINES["pdmesh"].split(":")
    return cast("LoadEngine", getattr(importlib.import_module(module), function))(config, progress)
