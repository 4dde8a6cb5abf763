"""The compiler takes every kernel for Hopper: what runs in the interpreter may still be refused there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

PTXAS = Path(os.environ.get("TRITON_PTXAS_PATH", Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"))


HAS_ASSEMBLER = pytest.mark.skipif(not os.access(PTXAS, os.X_OK), reason="Triton came without an assembler that can be run")


def lines_of(module: str) -> list[dict[str, Any]]:
    """What a module of this folder prints, in a process that compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.engine.kernels.triton.{module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)
@HAS_ASSEMBLER
def test_every_kernel_compiles_for_hopper_and_spills_nothing() -> None:
    kernels = lines_of("hopper")
    assert {kernel["kernel"] for kernel in kernels} >= {"vector_kernel", "tile_kernel", "limits_kernel"}
    assert [kernel for kernel in kernels if kernel["local"]] == []


@pytest.mark.timeout(900)
@HAS_ASSEMBLER
def test_no_draw_waits_for_a_compiler_once_the_sampler_is_prepared() -> None:
    [counted] = lines_of("variants")
    names = ["adjust_kernel", "count_kernel", "greedy_kernel", "limits_kernel", "pick_kernel", "scores_kernel"]
    assert counted == {"prepared": names, "later": []}
