"""What every part is told."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdmesh.models.catalogue import cache_folder

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Options:
    """`quick`: only to see that all work. `folder`: where what a part has measured so far is kept until it is whole."""

    model: Path
    quick: bool = False

    @property
    def folder(self) -> Path:
        return cache_folder() / "router" / ("quick" if self.quick else "full")

    def pick(self, full: float, quick: float) -> float:
        """The one that applies."""
        return quick if self.quick else full


class Kept:
    """Measured values of a part by name, each in a file from when it is known: an interrupted run goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> Any | None:
        """What was kept; None: nothing was."""
        path = self._path(name)
        return json.loads(path.read_text()) if path.exists() else None

    def put(self, name: str, value: Any) -> None:
        """Whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._path(name).with_suffix(".part")
        part.write_text(json.dumps(value))
        part.rename(self._path(name))

    def forget(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(list(self._folder.glob("*.json")))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
