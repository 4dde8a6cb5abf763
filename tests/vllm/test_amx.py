"""AMX is permitted before vLLM's kernels use it: else Linux ends the worker with SIGILL."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ARCH_GET_XCOMP_PERM, XTILEDATA, SYS_ARCH_PRCTL = 0x1022, 18, 158  # linux: arch/x86/include/uapi/asm/prctl.h
_CODE = f"""
import ctypes
from pdmesh_vllm.ranks.link import permit_amx
asked = permit_amx()
found = ctypes.c_uint64()
assert ctypes.CDLL(None).syscall({SYS_ARCH_PRCTL}, {ARCH_GET_XCOMP_PERM}, ctypes.byref(found)) == 0
print(asked, bool(found.value >> {XTILEDATA} & 1))
"""


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="AMX is of Linux on x86-64")
def test_a_process_that_loads_vllm_may_use_amx_where_there_is_any() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm runs this with it")
    has_amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(has_amx), str(has_amx)]
