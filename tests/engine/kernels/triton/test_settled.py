"""A kernel has the same name on the disk whatever a process launched before it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODULES = (
    "attention_kernels",
    "kv",
    "norms",
    "linear.weight_product",
    "experts.routing",
    "experts.product",
    "sampling.kernels",
    "blocks",
)
PROGRAM = """
import importlib, sys
modules = [importlib.import_module(f"pdmesh.engine.kernels.triton.{name}") for name in sys.argv[1].split(",")]
kernels = [value for module in modules for name, value in sorted(vars(module).items()) if name.endswith("_kernel")]
for kernel in kernels if sys.argv[2] == "forwards" else kernels[::-1]:
    kernel.cache_key
print(sorted((kernel.__name__, kernel.cache_key) for kernel in kernels))
"""


def keys(order: str) -> str:
    """In a process of its own, in which kernels are not interpreted."""
    names = MODULES if order == "forwards" else MODULES[::-1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, ",".join(names), order]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.timeout(300)
def test_keys_do_not_depend_on_the_order_of_launches() -> None:
    forwards = keys("forwards")
    assert forwards.count("_kernel'") >= len(MODULES)
    assert keys("backwards") == forwards
