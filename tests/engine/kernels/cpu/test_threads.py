"""The default number of threads follows a container's quota."""

from pathlib import Path

from pdmesh.engine.kernels.cpu.library import default_threads


def test_one_core_of_quota_is_one_thread(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    assert default_threads(tmp_path) == 1
