"""A kernel that is launched before the one in front of it has ended (programmatic dependent launch, Hopper and later).

A decode step is some ten short kernels a layer, and between two of them lies a microsecond or more in which the device starts the
next. Launched with `overlap()`, a kernel's programs are on the multiprocessors already and wait for the end of the one before:

    kernel n      |========|
    kernel n + 1      |..wait..|========|      instead of     |========|  gap  |========|

`behind_last` is the first thing that such a kernel does with memory: behind it all that came before is written, as kernel n too
has waited for kernel n - 1. Weights, which nothing writes, may be read ahead of it. A kernel without it is launched as ever. On
another device, and in the interpreter, OVERLAPS is False and nothing of it is compiled.

Measured (H200, 8B in int8, batch 32): a step of 5.45 ms in place of 5.68.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from pdmesh.engine.kernels.triton.kernel_cache_keys import settle_keys

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

_HOPPER = 90


@triton.jit
def behind_last(OVERLAPS: tl.constexpr):
    """Let the next kernel's programs come, and wait for the kernels before this one."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


settle_keys(globals())


def overlap() -> dict[str, bool]:
    """Return the arguments of a launch whose kernel begins with `behind_last(OVERLAPS)`."""
    return {"OVERLAPS": True, "launch_pdl": True} if _overlaps() else {"OVERLAPS": False}


@cache
def _overlaps() -> bool:
    return not triton.knobs.runtime.interpret and int(driver.active.get_current_target().arch) >= _HOPPER
