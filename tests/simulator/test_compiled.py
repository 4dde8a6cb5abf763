"""What is compiled is used where its sources are those that are there, and by nobody who has begun without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdmesh.simulator.compiled import KEPT_S, Build, CompileError

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = {
    "__init__": "",
    "halves": "def half(number: int) -> float:\n    return number / 2\n",
    "settings": "LEAST = 1\n",
    "waits": "import asyncio\n\nnap = asyncio.sleep\n",
    "main": "import extra\nfrom sums import halves, settings, waits\n\n\n"
    "def least() -> float:\n    return extra.ONE * halves.half(settings.LEAST)\n",
    "unasked": "",
}
SHOWN = "import os.path; from sums import halves, main, settings, waits; print(main.least()); " + "; ".join(
    f"print(os.path.splitext({name}.__file__)[1])" for name in ("main", "halves", "settings", "waits")
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def build(tmp_path: Path) -> Build:
    (tmp_path / "sources" / "sums").mkdir(parents=True)
    for name, text in SOURCES.items():
        (tmp_path / "sources" / "sums" / f"{name}.py").write_text(text)
    (tmp_path / "sources" / "extra.py").write_text("ONE = 1.0\n")  # a file beside the package
    return _build(tmp_path / "sources")


def _build(root: Path) -> Build:
    return Build(root, ("sums",), ("sums.main",), ("extra.py",), left=("sums.settings",), needs_no_speed=("asyncio",))


def _shown(build: Build, before: str = "pass") -> list[str]:
    """What a new process says: was it told to use them, then SHOWN."""
    program = f"from pathlib import Path; from pdmesh.simulator.compiled import Build; {before}; print({build!r}.use()); {SHOWN}"
    program = program.replace("PosixPath", "Path")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(build.root)])}
    shown = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return shown.stdout.split()


INTERPRETED = ["False", "0.5", ".py", ".py", ".py", ".py"]
COMPILED = ["True", "0.5", ".so", ".so", ".py", ".py"]


def test_what_is_compiled_is_used_by_those_who_begin_with_it(build: Build, cache: Path) -> None:
    assert _shown(build) == INTERPRETED
    assert build.make().parent == cache
    assert _shown(build) == COMPILED
    assert _shown(build, before="import sums.halves") == INTERPRETED  # half of it compiled would not fit the other half
    assert _shown(build, before=f"{build!r}.use()") == COMPILED


def test_only_what_matters_is_compiled(build: Build) -> None:
    names = {path.name.split(".")[0] for path in (build.make() / "sums").iterdir()}
    assert names - {"__init__"} == {"main", "halves"}  # neither what was left, nor what waits, nor what nobody imports


def test_other_sources_are_not_used(build: Build) -> None:
    build.make()
    (build.root / "sums" / "halves.py").write_text("def half(number: int) -> float:\n    return number / 4\n")
    changed = _build(build.root)
    assert changed.folder != build.folder
    assert _shown(changed) == ["False", "0.25", *INTERPRETED[2:]]


def test_a_new_build_removes_what_nobody_has_used_for_long(build: Build, cache: Path) -> None:
    old, recent, other = cache / "simulator-0", cache / "simulator-1", cache / "models"
    for folder in (old, recent, other):
        folder.mkdir(parents=True)
    for folder in (old, other):
        os.utime(folder, (0, 0))
    made = build.make()
    assert set(cache.iterdir()) == {made, recent, other}
    os.utime(made, (0, 0))
    assert _shown(build) == COMPILED and made.stat().st_mtime > KEPT_S  # used: it stays


def test_what_cannot_be_compiled_says_why_and_leaves_nothing(build: Build, cache: Path) -> None:
    (build.root / "sums" / "halves.py").write_text('def half(number: int) -> float:\n    return "half"\n')
    with pytest.raises(CompileError, match=r"(?s)mypyc failed: .*halves\.py:2: error: .*everything runs interpreted"):
        _build(build.root).make()
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_named(build: Build, cache: Path) -> None:
    cache.write_text("a file where the folder would be")
    with pytest.raises(CompileError, match=r"cache.*set PDMESH_CACHE to a folder that can be written"):
        build.make()


def test_without_mypy_it_is_said_what_to_install(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.simulator.compiled._mypy", lambda: "none")
    with pytest.raises(CompileError, match="install the package mypy"):
        build.make()
