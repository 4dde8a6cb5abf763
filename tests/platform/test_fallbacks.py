"""What a container may use: its quota of processors, and what its limit leaves of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.platform import fallbacks
from pdmesh.platform.fallbacks import cores_to_share, free_bytes, quota_cores


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


def test_cores_are_shared_as_far_as_a_quota_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "usable_cores", lambda: [3, 4, 6, 7])
    assert cores_to_share(tmp_path) == [3, 4, 6, 7]
    for quota, cores in (("250000 100000", [3, 4]), ("900000 100000", [3, 4, 6, 7]), ("1000 100000", [3])):
        (tmp_path / "cpu.max").write_text(quota)
        assert cores_to_share(tmp_path) == cores


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9000 kB\nMemAvailable:  2048 kB\n")
    return path


def test_the_machines_free_memory_counts(meminfo: Path, tmp_path: Path) -> None:
    assert free_bytes(meminfo, tmp_path) == 2_097_152
    assert free_bytes(tmp_path / "none", tmp_path) == fallbacks.physical_bytes()
    meminfo.write_text("MemTotal: 9000 kB\n")
    with pytest.raises(ValueError, match="MemAvailable"):
        free_bytes(meminfo, tmp_path)


def test_a_containers_limit_counts_and_pages_of_files_are_free(meminfo: Path, tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 300\nactive_file 100\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(meminfo, tmp_path) == 2_097_152
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_bytes(meminfo, tmp_path) == 700


def test_a_containers_limit_counts_in_version_1_of_control_groups(meminfo: Path, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("700\n")
    (tmp_path / "memory" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 50\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert free_bytes(meminfo, tmp_path) == 2_097_152
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000\n")
    assert free_bytes(meminfo, tmp_path) == 650
