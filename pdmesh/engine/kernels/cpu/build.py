"""Compilation of the kernels at first use, into a cache, and loading.

    $PDMESH_KERNELS_DIR/TIER/libpdmesh_cpu.so       built ahead; looked at first
    prebuilt/TIER/libpdmesh_cpu.so                  built ahead, beside the sources
    $PDMESH_CACHE/kernels/TIER-KEY/libpdmesh_cpu.so  compiled here; KEY follows from the sources, the flags and the compiler

A library appears by one rename, under a lock, and ends with a seal: the SHA-256 of what comes before it (the system's loader
does not mind). So a compiler that is killed leaves no library, and a library that was truncated later is recognized before it is
mapped, where it would end the process with SIGBUS. Other libraries of pdmesh (a `Project`) are compiled the same way.

    python -m pdmesh.engine.kernels.cpu.build [--all | --isa TIER] [--output FOLDER]       builds ahead
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pdmesh.engine.kernels.cpu import isa
from pdmesh.engine.loader.hash import cache_folder
from pdmesh.platform.fallbacks import cores_to_share

Say = Callable[[str], None]

SOURCES = Path(__file__).parent
LIBRARY = "libpdmesh_cpu.so"
_COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: the code uses infinities and NaN, and sums keep their order. Nothing is fused but what the sources fuse:
# otherwise the compiler chooses anew for each copy of an inlined function, and the same operation rounds in two ways.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall")
# A missing function is an error of the build, not of the first call.
_LINK_FLAGS = ("-shared", "-pthread", *(("-Wl,-z,defs",) if sys.platform == "linux" else ()))
# Weak: the sources may have this function themselves.
_STAMP_SOURCE = 'extern "C" __attribute__((weak)) const char* pdmesh_build_stamp() { return PDMESH_BUILD_STAMP; }\n'
_ELSE = "or run with --backend torch"


class NoCompiler(RuntimeError):
    """There is no C++ compiler, and no prebuilt library that fits. The message says what to do."""


class BuildFailed(RuntimeError):
    """The library cannot be compiled or loaded. The message has the compiler's last lines and what to do."""


@dataclass(frozen=True)
class Project:
    """Describe a library: the *.cpp and *.h of `folder`; `title` is its name in messages."""

    folder: Path
    library: str = LIBRARY
    title: str = "CPU kernels"
    module: str = "pdmesh.engine.kernels.cpu.build"  # the module whose command builds it ahead
    compile_s: int = 20  # approximate
    is_tiered: bool = True  # False: one library for all tiers, which detects by itself what the processor has

    def tier(self) -> isa.Tier:
        """Return the tier of this process. Raises ValueError for a wrong PDMESH_CPU_ISA."""
        return isa.detect() if self.is_tiered else isa.by_name("portable")

    def tiers(self) -> tuple[isa.Tier, ...]:
        """Return all tiers of this architecture."""
        return isa.compilable() if self.is_tiered else (isa.by_name("portable"),)


KERNELS = Project(SOURCES)


@dataclass(frozen=True)
class Sources:
    """Hold the sources of a project, read once: what is hashed is what is compiled, even if files are edited meanwhile."""

    project: Project
    files: tuple[tuple[str, bytes], ...]  # name and content, in the order of the names
    stamp: str  # hex SHA-256 of names and contents

    @staticmethod
    def read(project: Project) -> Sources:
        """Return the sources. Raises BuildFailed when there are none."""
        folder = project.folder
        paths = sorted(path for pattern in ("[!.]*.cpp", "[!.]*.h") for path in folder.glob(pattern))
        if not any(path.suffix == ".cpp" for path in paths):
            raise BuildFailed(f"there are no C++ sources in {folder}: this installation lacks them; reinstall pdmesh, {_ELSE}")
        files = tuple((path.name, path.read_bytes()) for path in paths)
        return Sources(project, files, _digest(part for name, content in files for part in (name.encode(), content)))


@dataclass(frozen=True)
class Compiler:
    """Name the C++ compiler: $CXX (with its options), else the first of c++, g++ and clang++ on PATH."""

    command: tuple[str, ...]

    @staticmethod
    def find() -> Compiler:
        """Return the compiler. Raises NoCompiler."""
        chosen, *options = os.environ.get("CXX", "").split() or [""]
        found = [path for name in ((chosen,) if chosen else _COMPILERS) if (path := shutil.which(name))]
        if found:
            return Compiler((os.path.abspath(found[0]), *options))
        if chosen:
            raise NoCompiler(f"CXX: there is no program {chosen!r}; name a C++ compiler (GCC 11, Clang 14 or newer) or unset it")
        raise NoCompiler(
            f"no C++ compiler is on PATH ({', '.join(_COMPILERS)}); install one (Debian, Ubuntu: apt install g++), name one in "
            f"CXX, or point PDMESH_KERNELS_DIR at libraries built ahead (python -m pdmesh.engine.kernels.cpu.build), {_ELSE}"
        )

    @property
    def identity(self) -> str:
        """Return what changes with an update of the compiler. Asking it for its version would cost each start 10 ms and more."""
        programs = [path for word in self.command if (path := shutil.which(word))]  # both words of "ccache g++"
        return repr((self.command, programs, [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, programs)]))


def load_library(say: Say = print, *, project: Project = KERNELS) -> ctypes.CDLL:
    """Return the library for this processor (or for the tier in PDMESH_CPU_ISA): prebuilt, or cached, or compiled now.

    `say` gets a line before anything that takes seconds, after it, and about each library that is passed over. Raises
    NoCompiler, BuildFailed, and ValueError for a wrong PDMESH_CPU_ISA.
    """
    tier, code = project.tier(), Sources.read(project)
    return _open_prebuilt(tier, code, say) or _open_cached(tier, code, Compiler.find(), say)


def library_path(tier: isa.Tier, *, project: Project = KERNELS) -> Path:
    """Return where the cache has, or will have, the library of a tier. Raises NoCompiler, BuildFailed."""
    return _cache_path(tier, Sources.read(project), Compiler.find())


def problem_of(path: Path, *, project: Project = KERNELS) -> str | None:
    """Return why a library that was built ahead is not used; None: it is."""
    try:
        _check(path, Sources.read(project).stamp)
    except (OSError, ValueError, BuildFailed) as error:
        return str(error)
    return None


def build_ahead(tier: isa.Tier, output: Path | None, say: Say = print, *, project: Project = KERNELS) -> Path:
    """Compile the library of a tier, which this processor need not have, into `output`/TIER and report the compiler's warnings;
    without `output` into the cache, unless it is there. Raises NoCompiler, BuildFailed, OSError."""
    code, compiler = Sources.read(project), Compiler.find()
    if output is None:
        return _in_cache(tier, code, compiler, say)
    path = output / tier.name / project.library
    if warnings := _compile(tier, code, compiler, path, say):
        say(_excerpt(warnings, "warning"))
    return path


def _open_prebuilt(tier: isa.Tier, code: Sources, say: Say) -> ctypes.CDLL | None:
    """Return the first prebuilt library from these very sources; None if there is none."""
    named = os.environ.get("PDMESH_KERNELS_DIR")
    for folder in filter(None, (named, str(code.project.folder / "prebuilt"))):
        path = Path(folder, tier.name, code.project.library).absolute()
        if path.exists() or folder == named:
            try:
                _check(path, code.stamp)
                return ctypes.CDLL(str(path))
            except (OSError, ValueError) as error:
                say(f"ignored the {code.project.title} built ahead: {error}")
    return None


def _open_cached(tier: isa.Tier, code: Sources, compiler: Compiler, say: Say) -> ctypes.CDLL:
    try:
        return _open(_in_cache(tier, code, compiler, say), code.project.title)
    except OSError as error:
        say(f"the cache cannot be written ({error}); set PDMESH_CACHE to a folder that can, to compile only once")
    with tempfile.TemporaryDirectory(prefix="pdmesh-kernels-") as folder:  # a loaded library does not need its file any more
        _compile(tier, code, compiler, path := Path(folder, code.project.library), say)
        return _open(path, code.project.title)


def _open(path: Path, title: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        message = f"the {title} cannot be loaded: {error}; set PDMESH_CACHE to a folder not mounted noexec, {_ELSE}"
        raise BuildFailed(message) from error


def _in_cache(tier: isa.Tier, code: Sources, compiler: Compiler, say: Say) -> Path:
    """Return the path of the cached library, after it was compiled if need be. OSError: the folder cannot be written."""
    path = _cache_path(tier, code, compiler)
    if _is_good(path, code.stamp):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(path.parent / ".lock", code.project.title, say):
        if not _is_good(path, code.stamp):
            if path.exists():
                say(f"{path} is damaged")
            for left_behind in path.parent.glob(".building-*"):  # left by a process that was killed: this process has the lock
                shutil.rmtree(left_behind, ignore_errors=True)
            _compile(tier, code, compiler, path, say)
    return path


def _cache_path(tier: isa.Tier, code: Sources, compiler: Compiler) -> Path:
    flags = (*_FLAGS, *tier.flags, tier.define, *_LINK_FLAGS, _STAMP_SOURCE)
    key = _digest(part.encode() for part in (code.stamp, *flags, compiler.identity, _abi()))
    return cache_folder().expanduser().absolute() / "kernels" / f"{tier.name}-{key[:16]}" / code.project.library


def _abi() -> str:
    """Return the ABI of this machine, because several kinds of machines may share a home folder."""
    return " ".join((sys.platform, platform.machine(), *platform.libc_ver()))


@contextlib.contextmanager
def _exclusive(lock: Path, title: str, say: Say) -> Iterator[None]:
    """Hold the lock. The kernel releases it when its holder dies. Compilers that outlive the holder did not inherit it."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that compiles the {title}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(tier: isa.Tier, code: Sources, compiler: Compiler, target: Path, say: Say) -> str:
    """Compile, link, seal, rename to `target`; return the warnings. Raises BuildFailed; OSError for an unwritable folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    started, what = time.monotonic(), f"{code.project.title} for {tier.name}"
    # Its name is new each time: a compiler that outlived its killed parent cannot write into it.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for source, content in (*code.files, ("pdmesh_build_stamp.cpp", _STAMP_SOURCE.encode())):
            (folder / source).write_bytes(content)
        say(f"compiling {what} (once, about {code.project.compile_s} s)")
        warnings = _compile_and_link(tier, code, compiler, folder)
        built = folder / code.project.library
        seal = hashlib.sha256(built.read_bytes()).digest()
        with built.open("ab") as file:
            file.write(seal)
        built.replace(target)
    say(f"compiled {what} in {time.monotonic() - started:.1f} s")
    return warnings


def _compile_and_link(tier: isa.Tier, code: Sources, compiler: Compiler, folder: Path) -> str:
    """Leave the library in `folder`; the compiler sees file names alone. Return its warnings."""
    options = (*_FLAGS, *tier.flags, tier.define, f'-DPDMESH_BUILD_STAMP="{code.stamp}"')
    sources = sorted(path.name for path in folder.glob("*.cpp"))
    commands = [(*compiler.command, *options, "-c", name, "-o", f"{name}.o") for name in sources]
    with ThreadPoolExecutor(len(cores_to_share())) as pool:
        warnings = list(pool.map(lambda command: _run(command, folder, code.project.title), commands))
    objects = (f"{name}.o" for name in sources)
    link = (*compiler.command, *objects, *_LINK_FLAGS, "-o", code.project.library)
    return "".join([*warnings, _run(link, folder, code.project.title)])


def _run(command: Sequence[str], folder: Path, title: str) -> str:
    """Return what the compiler printed. Raises BuildFailed."""
    try:
        environment = {**os.environ, "LC_ALL": "C"}  # messages in English
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}; name another C++ compiler in CXX, {_ELSE}") from error
    if done.returncode:
        why = _excerpt(done.stdout + done.stderr, "error|undefined")
        raise BuildFailed(
            f"the {title} did not compile ({shlex.join(command)}):\n{why}\n"
            f"Use GCC 11, Clang 14 or newer (CXX names one), a simpler tier ({isa.VARIABLE}=portable), {_ELSE}."
        )
    return done.stdout + done.stderr


def _excerpt(output: str, about: str) -> str:
    """Return 20 lines from the first that matches `about`, else the last 20: the explanation of one error can fill hundreds."""
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if re.search(about, line)), max(0, len(lines) - 20))
    return "\n".join(lines[first : first + 20])


def _check(path: Path, stamp: str) -> None:
    """Raise ValueError unless the library is whole and from the sources of `stamp`; OSError if it cannot be read.

    The stamp is sought in the bytes, not by calling pdmesh_build_stamp(): that would map a library that may be another's.
    """
    content = path.read_bytes()
    if hashlib.sha256(memoryview(content)[:-32]).digest() != content[-32:]:
        raise ValueError(f"{path} is damaged, or not made by `python -m pdmesh.engine.kernels.cpu.build`")
    if stamp.encode() not in content:
        raise ValueError(f"{path} was built from other sources than those of this installation; build it anew")


def _is_good(path: Path, stamp: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        _check(path, stamp)
        return True
    return False


def _digest(parts: Iterator[bytes]) -> str:
    """Return a hex SHA-256 that tells ("a", "bc") from ("ab", "c")."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None, *, project: Project = KERNELS) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {project.module}", description=f"Compiles the {project.title} ahead.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="for every tier of this architecture (default: this processor's)")
    which.add_argument("--isa", choices=[tier.name for tier in isa.TIERS], help="for this tier")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="into FOLDER/TIER instead of the cache")
    chosen = parser.parse_args(argv)
    try:
        for tier in project.tiers() if chosen.all else [isa.by_name(chosen.isa) if chosen.isa else project.tier()]:
            print(f"{tier.name}: {build_ahead(tier, chosen.output, project=project)}")
    except (NoCompiler, BuildFailed, ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
