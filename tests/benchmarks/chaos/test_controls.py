"""What a worker is hurt by from outside: its clock, and failpoints that are armed while it runs."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.arming import Arming
from tests.chaos.mesh import Clock, build

_ECHO_CLOCKS = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
_HIT_POINTS = (
    "import sys\nfrom pdmesh.runtime.failpoints import hit\nfor line in sys.stdin: hit(line.strip()); print('on', flush=True)"
)


class Child:
    """A program that answers a line for each line."""

    def __init__(self, program: str, environment: dict[str, str]) -> None:
        env = {**os.environ, "PYTHONPATH": ".", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str = "") -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        self.process.communicate(timeout=10)
        return self.process.returncode


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a C compiler")
@pytest.mark.parametrize("jump_s", [3600.0, -30 * 86_400.0, 0.25])
def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(tmp_path: Path, jump_s: float) -> None:
    clock = Clock(build(tmp_path), tmp_path / "clock")
    child = Child(_ECHO_CLOCKS, clock.environment)
    for shift_s in (0.0, jump_s, 0.0):
        clock.jump(shift_s)
        wall, monotonic = map(float, child.ask().split())
        assert abs(wall - time.time() - shift_s) < 0.2
        assert abs(monotonic - time.monotonic()) < 0.2
    assert child.end() == 0


async def test_failpoints_are_armed_and_disarmed_while_the_process_runs(tmp_path: Path) -> None:
    arming = Arming(tmp_path / "worker.failpoints")
    child = Child(_HIT_POINTS, arming.environment)
    assert child.ask("a") == "on"
    arming.arm("a", "delay:1@1")
    assert not await arming.until_hit("a", 0.01)
    assert child.ask("a") == "on"
    assert await arming.until_hit("a", 1.0)
    arming.arm("a", "kill@1")
    assert not arming.was_hit("a")  # the former hit was of the former arming
    arming.disarm("a")
    assert child.ask("a") == "on"
    arming.arm("b", "kill@1")
    assert child.ask("b") == ""
    assert await arming.until_hit("b", 1.0)
    assert child.end() == -9
