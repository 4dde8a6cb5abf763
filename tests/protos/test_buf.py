"""What buf is to find: breaks of generated code that stable.json does not know, and none where the promise allows a change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.protos import buf

MESH = "pdmesh/v1/mesh.proto"


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return buf.buf()
    except buf.BufMissing as missing:
        pytest.skip(f"{missing}; {buf.NOT_CHECKED}")


def edited(folder: Path, old: str, new: str) -> Path:
    """A copy of the proto files with one change in all files of ours."""
    protos = folder / "protos"
    shutil.copytree(buf.PROTOS, protos)
    for path in (protos / "pdmesh/v1").glob("*.proto"):
        path.write_text(path.read_text().replace(old, new))
    return protos


def test_the_api_is_recorded(program: Path) -> None:
    buf.check(program)
    assert buf.image(program) == buf.RECORDED.read_bytes(), "additions are not recorded: run `make stubs`"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('java_package = "io.github.pdmesh.v1"', 'java_package = "io.github.other.v1"', "java_package"),
        ("gen/go/pdmesh/v1;pdmeshv1", "gen/go/pdmesh/v1;mesh", "go_package"),
        ("message Usage {", "message TokenUsage {", "Usage"),
        ("string stop_reason = 7;", 'string stop_reason = 7 [json_name = "why"];', "json_name"),
        ("// seed in force.\n", "\n", "comment"),
        ("uint32 accepted_tokens = 5;", "uint32 acceptedTokens = 5;", "accepted_tokens"),
    ],
)
def test_it_finds(program: Path, tmp_path: Path, old: str, new: str, found: str) -> None:
    with pytest.raises(SystemExit, match=found):
        buf.check(program, edited(tmp_path, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uint32 accepted_tokens = 5;", "optional uint32 accepted_tokens = 5;"),
        ("uint32 accepted_tokens = 5;", "uint32 accepted_tokens = 5;\n  // more of them.\n  uint32 more = 99;"),
        ("bytes data = 1;", "bytes chunk = 1;"),
    ],
)
def test_the_promise_allows(program: Path, tmp_path: Path, old: str, new: str) -> None:
    buf.check(program, edited(tmp_path, old, new))


def test_it_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    buf.main()
    assert capsys.readouterr().out.startswith("SKIPPED: npm is not installed\nnot checked: ")
