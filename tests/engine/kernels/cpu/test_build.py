"""The kernels are compiled once, whoever asks; what is damaged, foreign or half done is never loaded; errors say what to do."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pdmesh.engine.kernels.cpu import build, isa
from pdmesh.engine.kernels.cpu.build import Project
from tests.support.waiting import alive, eventually

REAL_COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), "")
needs_compiler = pytest.mark.skipif(not REAL_COMPILER, reason="there is no C++ compiler")
PORTABLE = isa.by_name("portable")
EXECUTIONS = 4  # two sources, the stamp, the link

HEADER = "int six();\n"
SIX = '#include "numbers.h"\nint six() { return 6; }\n'
ANSWER = '#include "numbers.h"\nextern "C" int answer() { return 7 * six(); }\n'
# Says that it runs; once there is a gate, waits until it is open; becomes the compiler.
COMPILER = """#!/bin/sh
echo $$ >> "{folder}/pids"
while [ -e "{folder}/gate" ]; do sleep 0.01; done
exec {compiler} "$@"
"""
LOAD = """import sys
from pathlib import Path
from pdmesh.engine.kernels.cpu.build import Project, load_library
print(load_library(lambda line: print(line, flush=True), project=Project(Path(sys.argv[1]))).answer(), flush=True)
"""


class CompilerScript:
    """Stands in for the compiler in CXX."""

    def __init__(self, folder: Path) -> None:
        self.gate, self._pids = folder / "gate", folder / "pids"
        script = folder / "compiler"
        script.write_text(COMPILER.format(folder=folder, compiler=REAL_COMPILER), encoding="utf-8")
        script.chmod(0o755)
        self.path = str(script)

    def pids(self) -> list[int]:
        """One for each time it ran."""
        return [int(line) for line in self._pids.read_text(encoding="ascii").split()] if self._pids.exists() else []

    def open_gate(self) -> None:
        self.gate.unlink(missing_ok=True)

    async def ended(self) -> None:
        await eventually(lambda: not any(alive(pid) for pid in self.pids()))


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PDMESH_CPU_ISA", "portable")
    monkeypatch.delenv("PDMESH_KERNELS_DIR", raising=False)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, content in (("numbers.h", HEADER), ("six.cpp", SIX), ("answer.cpp", ANSWER)):
        (folder / name).write_text(content, encoding="utf-8")
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilerScript]:
    (tmp_path / "compiler").mkdir()
    script = CompilerScript(tmp_path / "compiler")
    monkeypatch.setenv("CXX", script.path)
    yield script
    script.open_gate()


@contextmanager
def loader(sources: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that loads the library; it ends with the block."""
    command = [sys.executable, "-c", LOAD, str(sources)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def load(sources: Path) -> tuple[int, str]:
    """What the loaded library computes, and all that was said."""
    said: list[str] = []
    return build.load_library(said.append, project=Project(sources)).answer(), "\n".join(said)


def left_behind(path: Path) -> list[Path]:
    return [found for found in path.parent.iterdir() if found.name not in (build.LIBRARY, ".lock")]


@needs_compiler
@pytest.mark.parametrize("tier", isa.supported(), ids=lambda tier: tier.name)
def test_the_sources_see_their_tier(sources: Path, tier: isa.Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CPU_ISA", tier.name)
    code = f"#if PDMESH_ISA_{tier.name.upper()} != 1\n#error another tier\n#endif\n"
    (sources / "tier.cpp").write_text(code, encoding="ascii")
    library = build.load_library(lambda _: None, project=Project(sources))
    library.pdmesh_build_stamp.restype = ctypes.c_char_p
    assert library.pdmesh_build_stamp().decode() == build.Sources.read(Project(sources)).stamp
    assert build.library_path(tier, project=Project(sources)).parent.name.startswith(f"{tier.name}-")


@pytest.mark.parametrize(
    ("compiler", "tier"),
    [("aarch64-linux-gnu-g++", "neon_bf16"), ("aarch64-linux-gnu-g++", "neon_dotprod"), ("clang++", None), ("g++", "amx")],
)
def test_all_sources_of_the_kernels_are_read_by_other_compilers_and_for_other_machines(compiler: str, tier: str | None) -> None:
    """Other tests compile the parts that they run; an error elsewhere would leave ARM and Macs to the slower torch backend."""
    wanted = isa.detect() if tier is None else isa.by_name(tier)
    if compiler == "g++" and wanted not in isa.compilable():
        pytest.skip(f"{tier} is not of this machine's processors")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    files = map(str, sorted(build.SOURCES.glob("*.cpp")))
    done = subprocess.run(
        [compiler, *build._FLAGS, *wanted.flags, wanted.define, "-fsyntax-only", *files],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_it_is_compiled_once_and_said(sources: Path, compiler: CompilerScript) -> None:
    answer, said = load(sources)
    assert answer == 42
    assert "compiling CPU kernels for portable" in said
    assert "compiled CPU kernels for portable in" in said
    assert load(sources) == (42, "")
    assert len(compiler.pids()) == EXECUTIONS
    assert not left_behind(build.library_path(PORTABLE, project=Project(sources)))


@needs_compiler
@pytest.mark.parametrize("change", ["source", "header", "compiler"])
def test_a_change_means_compiling_again(sources: Path, compiler: CompilerScript, change: str) -> None:
    before = build.library_path(PORTABLE, project=Project(sources))
    changed = {"source": sources / "six.cpp", "header": sources / "numbers.h", "compiler": Path(compiler.path)}[change]
    with changed.open("a", encoding="utf-8") as file:
        file.write("\n")
    assert build.library_path(PORTABLE, project=Project(sources)) != before


@needs_compiler
def test_sources_may_bring_their_own_stamp(sources: Path) -> None:
    code = 'extern "C" const char* pdmesh_build_stamp() { return PDMESH_BUILD_STAMP; }\n'
    (sources / "stamp.cpp").write_text(code, encoding="ascii")
    assert load(sources)[0] == 42


@needs_compiler
def test_of_two_processes_one_compiles(sources: Path, compiler: CompilerScript) -> None:
    compiler.gate.touch()
    with ExitStack() as stack:
        first = stack.enter_context(loader(sources))
        assert line_of(first).startswith("compiling")
        second = stack.enter_context(loader(sources))
        assert line_of(second) == "waiting for another process that compiles the CPU kernels"
        compiler.open_gate()
        assert line_of(first).startswith("compiled")
        assert (line_of(first), line_of(second)) == ("42", "42")
        assert (first.wait(), second.wait()) == (0, 0)
    assert len(compiler.pids()) == EXECUTIONS


@needs_compiler
async def test_a_builder_killed_midway_leaves_no_library(sources: Path, compiler: CompilerScript) -> None:
    path = build.library_path(PORTABLE, project=Project(sources))
    compiler.gate.touch()
    with loader(sources) as builder:
        assert line_of(builder).startswith("compiling")
        await eventually(compiler.pids)
        os.kill(builder.pid, 9)
        assert builder.wait() == -9
    assert not path.exists()
    assert left_behind(path)
    compiler.open_gate()
    await compiler.ended()
    assert load(sources)[0] == 42
    assert not left_behind(path)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "empty": lambda content: b"",
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_compiled_again(sources: Path, damage: Callable[[bytes], bytes]) -> None:
    path = build.build_ahead(PORTABLE, None, lambda _: None, project=Project(sources))
    path.write_bytes(damage(path.read_bytes()))
    answer, said = load(sources)
    assert answer == 42
    assert f"{path} is damaged" in said
    assert load(sources) == (42, "")


@needs_compiler
def test_an_unwritable_cache_is_done_without(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    answer, said = load(sources)
    assert answer == 42
    assert re.search("the cache cannot be written.* PDMESH_CACHE", said)
    assert not list((tmp_path / "temporary").iterdir())


@needs_compiler
@pytest.mark.parametrize("folder", ["image", "sources/prebuilt"])
def test_built_ahead_needs_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    build.build_ahead(PORTABLE, tmp_path / folder, lambda _: None, project=Project(sources))
    if folder == "image":
        monkeypatch.setenv("PDMESH_KERNELS_DIR", str(tmp_path / folder))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load(sources) == (42, "")
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_a_library_of_other_sources_is_ignored(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build_ahead(PORTABLE, tmp_path / "image", lambda _: None, project=Project(sources))
    monkeypatch.setenv("PDMESH_KERNELS_DIR", str(tmp_path / "image"))
    (sources / "six.cpp").write_text(SIX.replace("6;", "9;"), encoding="ascii")
    answer, said = load(sources)
    assert answer == 63
    assert "built from other sources" in said


@needs_compiler
def test_what_is_damaged_or_missing_is_ignored(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.build_ahead(PORTABLE, tmp_path / "image", lambda _: None, project=Project(sources))
    monkeypatch.setenv("PDMESH_KERNELS_DIR", str(tmp_path / "image"))
    path.write_bytes(DAMAGES["cut"](path.read_bytes()))
    assert f"ignored the CPU kernels built ahead: {path} is damaged" in load(sources)[1]
    path.unlink()
    assert "No such file" in load(sources)[1]


def test_without_a_compiler_the_error_says_what_to_do(sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NoCompiler, match=r"no C\+\+ compiler is on PATH .* CXX, .*PDMESH_KERNELS_DIR .*--backend torch"):
        load(sources)
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(build.NoCompiler, match="CXX: there is no program 'no-such-compiler'"):
        load(sources)


def test_a_compiler_that_cannot_run_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("#!/no/such/interpreter\n", encoding="ascii")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "broken"))
    with pytest.raises(build.BuildFailed, match=r"broken cannot be run: .*CXX"):
        load(sources)


@needs_compiler
def test_a_failed_build_shows_what_the_compiler_said(sources: Path) -> None:
    path = build.library_path(PORTABLE, project=Project(sources))
    (sources / "six.cpp").unlink()
    with pytest.raises(build.BuildFailed, match="undefined"):  # declared, called, and nowhere written
        load(sources)
    (sources / "six.cpp").write_text("int six() { return seven; }\n", encoding="ascii")
    with pytest.raises(build.BuildFailed, match=r"six\.cpp:1:.*seven(.|\n)*PDMESH_CPU_ISA=portable.*--backend torch"):
        load(sources)
    for folder in path.parent.parent.iterdir():
        assert not left_behind(folder / build.LIBRARY)


def test_an_installation_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(build.BuildFailed, match=r"no C\+\+ sources in .*reinstall"):
        load(tmp_path)


@needs_compiler
def test_the_command_builds_ahead(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sources / "six.cpp").write_text(SIX.replace("return", "int unused; return"), encoding="ascii")
    build.main(["--all", "--output", str(tmp_path / "image")], project=Project(sources))
    printed = capsys.readouterr().out
    for tier in isa.compilable():
        path = tmp_path / "image" / tier.name / build.LIBRARY
        assert path.is_file()
        assert f"{tier.name}: {path}" in printed
    assert "unused" in printed  # the compiler's warning
    build.main(["--isa", "portable"], project=Project(sources))
    assert build.library_path(PORTABLE, project=Project(sources)).is_file()


def test_the_command_ends_with_the_error(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match=r"python -m pdmesh\.engine\.kernels\.cpu\.build: CXX: there is no program"):
        build.main(["--isa", "portable"], project=Project(sources))
