"""What has its name in the cache is complete, and one process at a time makes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pdmesh.models.catalogue import building, exclusive, publish, write_marker


def test_publishing_replaces_and_building_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / ".target.building-left-behind").mkdir()
    for content in ("old", "new"):
        with building(target) as folder:
            (folder / "file").write_text(content)
            write_marker(folder, "hash")
            publish(folder, target)
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


HOLD = """
import sys
from pathlib import Path
from pdmesh.models.catalogue import building, exclusive
with exclusive(Path(sys.argv[1]), print), building(Path(sys.argv[1])) as folder:
    print("holding", flush=True)
    sys.stdin.read()
"""


def test_a_lock_keeps_others_out_until_its_holder_dies(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holding\n"
        said: list[str] = []

        def kill(message: str) -> None:
            said.append(message)
            os.kill(holder.pid, signal.SIGKILL)

        with exclusive(target, kill), building(target):
            assert len(list(tmp_path.glob(".target.building-*"))) == 1
    assert said == ["waiting for another process that prepares target"]
