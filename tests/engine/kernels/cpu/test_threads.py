"""The default number of threads follows a container's quota."""

from pathlib import Path

import pytest

from pdmesh.engine.kernels.cpu.threads import default_threads, quota_cores


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", None), ("150000 100000", 1), ("400000 100000", 4), ("1000 100000", 1)]
)
def test_quota_of_version_2(tmp_path: Path, content: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert quota_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("250000", 2)])
def test_quota_of_version_1(tmp_path: Path, quota: str, cores: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert quota_cores(tmp_path) == cores


def test_damaged_or_missing_files_are_no_quota(tmp_path: Path) -> None:
    assert quota_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("garbage")
    assert quota_cores(tmp_path) is None


def test_one_core_of_quota_is_one_thread(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    assert default_threads(tmp_path) == 1
