"""A file that is mapped in huge pages is the file, for as long as something looks at it, wherever its pages are."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import pytest

from pdmesh.platform import huge_pages
from pdmesh.platform.huge_pages import HUGE_PAGE

linux_alone = pytest.mark.skipif(sys.platform != "linux", reason="only Linux maps files so")


def written(folder: Path, num_bytes: int) -> tuple[Path, bytes]:
    content = os.urandom(num_bytes)
    (path := folder / "mapped-by-the-test").write_bytes(content)
    return path, content


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


@linux_alone
@pytest.mark.parametrize("num_bytes", [HUGE_PAGE, 9 * HUGE_PAGE, HUGE_PAGE + 4096, 100])
def test_it_is_the_file_and_goes_with_its_last_view(num_bytes: int, tmp_path: Path) -> None:
    path, content = written(tmp_path, num_bytes)
    with path.open("rb") as file:
        view, _ = huge_pages.map_file(file.fileno(), num_bytes)
    part = view[10:20]
    assert view == content and ctypes.addressof(ctypes.c_char.from_buffer(view)) % HUGE_PAGE == 0
    del view
    gc.collect()
    assert part == content[10:20] and is_mapped(path)
    del part
    gc.collect()
    assert not is_mapped(path)


@linux_alone
def test_what_cannot_be_mapped_leaves_nothing(tmp_path: Path) -> None:
    path, _ = written(tmp_path, HUGE_PAGE)
    with path.open("wb") as file, pytest.raises(PermissionError, match="mmap"):  # not open for reading
        huge_pages.map_file(file.fileno(), HUGE_PAGE)
    gc.collect()
    assert not is_mapped(path)


@linux_alone
def test_without_proc_it_does_not_count_as_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = written(tmp_path, HUGE_PAGE)
    monkeypatch.setenv("PDMESH_WITHOUT", "proc")
    with path.open("rb") as file:
        view, is_huge = huge_pages.map_file(file.fileno(), HUGE_PAGE)
    assert view == content and not is_huge


def test_another_system_says_that_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written(tmp_path, HUGE_PAGE)
    monkeypatch.setattr("sys.platform", "darwin")
    with path.open("rb") as file, pytest.raises(OSError, match="MAP_FIXED"):
        huge_pages.map_file(file.fileno(), HUGE_PAGE)
