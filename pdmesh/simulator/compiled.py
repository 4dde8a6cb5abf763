"""Compiles the simulator and its policies by mypyc from the same sources: equal numbers, two to three times as fast.

`python -m pdmesh.simulator.compiled` compiles them into the cache, which takes some minutes once for each state of the sources;
it needs mypy and a C compiler. `use()` imports them from there; without them everything runs interpreted.

Compiled code has limits: generator expressions become lists (`yield` stays lazy), interpreted classes cannot inherit from
compiled ones, frozen dataclasses do not pickle, and dataclasses forget the types of their fields. From Python 3.12 on `sum`
rounds floats better where it is interpreted: last digits may differ there.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

TIMEOUT_S = 1800.0
KEPT_S = 86_400.0
"""Other builds (of other checkouts, or of earlier sources) are removed when unused for this long."""
_LIBRARY = EXTENSION_SUFFIXES[0]
_ELSE = "without compiled modules everything runs interpreted, slower"


class CompileError(Exception):
    """Raised when compilation fails: why, and what to do."""


@dataclass(frozen=True)
class Build:
    """Describe a build. It compiles modules below `root`: of `packages` (folders, files) all that `entries` import, but `left`
    and, unless it is one of `fast`, what imports one of `needs_no_speed`. `seen`: folders and files that mypy has to see, too."""

    root: Path
    packages: tuple[str, ...]
    entries: tuple[str, ...]
    seen: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    fast: tuple[str, ...] = ()
    needs_no_speed: tuple[str, ...] = ()

    @cached_property
    def folder(self) -> Path:
        """Return the folder of the compiled modules of these very sources, for this Python and mypy. It may not exist."""
        digest = hashlib.sha256(f"{sysconfig.get_config_var('SOABI')} {_mypy()}".encode())
        for package in (*self.packages, *self.seen):
            found = self.root / package
            for path in [found] if found.is_file() else sorted(found.rglob("*.py")):
                digest.update(f"{path.relative_to(self.root)}\0".encode() + path.read_bytes() + b"\0")
        return _cache_folder() / f"simulator-{digest.hexdigest()[:16]}"

    def use(self) -> bool:
        """Import compiled modules from now on, if there are any for these sources. Call it before any of them is imported; if one
        is imported already, or nothing was compiled, nothing changes. Returns whether they are used."""
        if any(isinstance(finder, _Finder) and finder.folder == self.folder for finder in sys.meta_path):
            return True
        if not self.folder.is_dir():
            return False
        finder = _Finder(self.folder)
        if any(name in sys.modules for name in finder.libraries):
            return False
        with contextlib.suppress(OSError):  # another user's cache is not marked as used
            os.utime(self.folder)
        sys.meta_path.insert(0, finder)
        return True

    def make(self) -> Path:
        """Return the folder of the compiled modules, compiling them if needed. Raises CompileError."""
        if not self.folder.is_dir():
            try:
                self._make()
            except OSError as error:
                raise CompileError(f"{error}; set PDMESH_CACHE to a folder that can be written; {_ELSE}") from error
        return self.folder

    def _make(self) -> None:
        cache = self.folder.parent
        cache.mkdir(parents=True, exist_ok=True)
        _remove_old(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix="simulator-compiling-") as scratch:
            root, built = Path(scratch, "sources"), Path(scratch, "built")
            for package in (*self.packages, *self.seen):
                _copy(self.root / package, root / package)
                for parent in list(Path(package).parents)[:-1]:
                    shutil.copy(self.root / parent / "__init__.py", root / parent / "__init__.py")
            _compile(root, self._modules(root))
            for library in _libraries(root).values():
                target = built / library.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(library, target)
            try:
                built.rename(self.folder)
            except OSError:
                if not self.folder.is_dir():  # else another process was faster
                    raise

    def _modules(self, root: Path) -> list[str]:
        """Return the paths of what is compiled, below `root`."""
        program = f"import sys, {', '.join(self.entries)}; print(*sys.modules)"
        names = [name for name in sorted(_run([sys.executable, "-c", program], root).split()) if name not in self.left]
        paths = {name: root / path for name in names if self._is_packaged(path := f"{name.replace('.', '/')}.py")}
        kept = [path for name, path in paths.items() if path.is_file() and (name in self.fast or not self._is_slow(path))]
        return [str(path.relative_to(root)) for path in kept]

    def _is_packaged(self, path: str) -> bool:
        return path in self.packages or path.startswith(tuple(f"{package}/" for package in self.packages))

    def _is_slow(self, path: Path) -> bool:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        imported = [f"{words[1]}." for words in lines if len(words) > 1 and words[0] in ("import", "from")]
        return any(name.startswith(f"{slow}.") for name in imported for slow in self.needs_no_speed)


SIMULATOR = Build(
    root=Path(__file__).resolve().parents[2],
    packages=("pdmesh/simulator", "pdmesh/autoscaler", "router", "pdmesh/planning", "pdmesh/step_sharing.py"),
    entries=("pdmesh.simulator.autoscaling", "pdmesh.simulator.results", "pdmesh.simulator.arrivals"),
    seen=("pdmesh/runtime", "pdmesh/v1", "pdmesh/text", "kvtransfer", "pdmesh/adapter_id.py"),
    left=("pdmesh.autoscaler.settings", "router.config"),  # configuration is read by the types of its fields
    fast=(
        "pdmesh.autoscaler.collect.workers",
        "pdmesh.simulator.autoscaling",
        "router.flow_control.controller",
        "router.kv_index.index",
    ),
    needs_no_speed=("asyncio", "grpc", "pdmesh.v1", "redis"),
)


def use() -> bool:
    """Use the simulator's build; call it before the simulator or a policy is imported. See `Build.use`."""
    return SIMULATOR.use()


class _Finder(MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self.folder, self.libraries = folder, _libraries(folder)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        library = self.libraries.get(fullname)
        return None if library is None else spec_from_file_location(fullname, library)


def _cache_folder() -> Path:
    """Return the cache folder, as `pdmesh/models/catalogue.py` does, which lies above this layer."""
    chosen = os.environ.get("PDMESH_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "pdmesh"


def _remove_old(cache: Path) -> None:
    """Remove old builds, complete ones and remains of killed ones."""
    for folder in cache.glob("simulator-*"):
        if time.time() - folder.stat().st_mtime > KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def _mypy() -> str:
    try:
        return metadata.version("mypy")
    except metadata.PackageNotFoundError:
        return "none"


def _compile(root: Path, modules: Iterable[str]) -> None:
    if _mypy() == "none":
        raise CompileError(f"mypy is not installed, which compiles: install the package mypy; {_ELSE}")
    try:
        _run([sys.executable, "-m", "mypyc", *modules], root)
    except CompileError as error:
        raise CompileError(f"{error}\nIt takes a C compiler and the headers of this Python; {_ELSE}") from error


def _run(command: Sequence[str], folder: Path) -> str:
    """Return the command's output. Raises CompileError."""
    # A product and a sum are rounded separately, as in the interpreter.
    flags = f"{os.environ.get('CFLAGS', '')} -ffp-contract=off".strip()
    environment = {**os.environ, "PYTHONPATH": str(folder), "CFLAGS": flags}
    name = " ".join(command[1:3])
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{name}: not done within {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise CompileError(f"{name} failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _libraries(folder: Path) -> dict[str, Path]:
    """Return the libraries by the name of their module."""
    found = [path.relative_to(folder) for path in folder.rglob(f"*{_LIBRARY}")]
    return {
        str(path)[: -len(_LIBRARY)].replace("/", "."): folder / path
        for path in found
        if path.parts[0] != "build"  # of the compiler
    }


def main() -> int:
    """Compile, and print the folder."""
    try:
        print(SIMULATOR.make())
    except CompileError as error:
        print(f"pdmesh.simulator.compiled: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
