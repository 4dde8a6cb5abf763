"""The compiler takes every kernel for Hopper: what runs in the interpreter may still be refused there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

PTXAS = Path(os.environ.get("TRITON_PTXAS_PATH", Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"))


@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.access(PTXAS, os.X_OK), reason="Triton came without an assembler that can be run")
def test_every_kernel_compiles_for_hopper_and_spills_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.kernels.triton.hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} >= {"vector_kernel", "tile_kernel", "limits_kernel"}
    assert [kernel for kernel in kernels if kernel["local"]] == []
