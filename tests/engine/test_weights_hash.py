"""The weights hash follows the bytes, is computed once, and distrusts what it remembers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdmesh.engine.loader.hash import cache_folder, weights_hash


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "config.json", tmp_path / "model.safetensors"]
    for path in paths:
        path.write_bytes(os.urandom(1000))
    return paths


def reads(files: list[Path]) -> tuple[str, bool]:
    """The hash, and whether the files were read for it."""
    shares: list[float] = []
    digest = weights_hash(files, shares.append)
    return digest, bool(shares)


def test_it_is_computed_once(files: list[Path]) -> None:
    digest, was_read = reads(files)
    assert was_read
    assert len(digest) == 64
    assert reads(files) == (digest, False)


def test_it_follows_content_name_and_split(files: list[Path], tmp_path: Path) -> None:
    digest = weights_hash(files)
    files[1].write_bytes(os.urandom(1001))
    changed = weights_hash(files)
    moved = files[1].rename(tmp_path / "other.safetensors")
    assert len({digest, changed, weights_hash([files[0], moved])}) == 3


def test_equal_files_elsewhere_have_the_same_hash(files: list[Path], tmp_path: Path) -> None:
    copies = []
    for path in files:
        copy = tmp_path / "copy" / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copies.append(copy)
    assert reads(copies) == (weights_hash(files), True)


def test_a_changed_time_means_reading_again(files: list[Path]) -> None:
    digest = weights_hash(files)
    os.utime(files[0], ns=(1, 1))
    assert reads(files) == (digest, True)


@pytest.mark.parametrize("garbage", [b"", b"\xff\x00", b"[]", b"{}", b"null", b'{"files": 3, "sha256": 4}', b"9" * 5000])
def test_garbage_in_the_sidecar_means_reading_again(files: list[Path], cache: Path, garbage: bytes) -> None:
    digest = weights_hash(files)
    [sidecar] = (cache / "hashes").glob("*.json")
    sidecar.write_bytes(garbage)
    assert reads(files) == (digest, True)
    assert reads(files) == (digest, False)


def test_a_hash_that_is_none_is_not_believed(files: list[Path], cache: Path) -> None:
    digest = weights_hash(files)
    [sidecar] = (cache / "hashes").glob("*.json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "sha256": "nonsense"}))
    assert weights_hash(files) == digest


def test_an_unwritable_cache_costs_only_time(files: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "taken"))
    assert reads(files) == (weights_hash(files), True)


def test_the_cache_folder_is_the_users_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PDMESH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "pdmesh"
