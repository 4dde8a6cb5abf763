"""What all kernels share: their names in Triton's cache, and how they are launched one behind the other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

# Triton's keys of kernels in its disk cache, made the same in every process.
#
# Triton (3.6, `DependenciesFinder._update_hash`) puts the global constants of a called function into the caller's key only if
# that function's own key is known by then. So a kernel's key would depend on which kernels a process launched before it, and what
# one process has compiled another would compile again. A module settles the keys of all its functions when it is imported: those
# of modules that it imports are settled before, its own follow in their order in the module.


def settle_keys(namespace: Mapping[str, object]) -> None:
    """Settle the keys of `namespace`, the module's, once all its functions and constants are defined. No-op in the
    interpreter."""
    for value in list(namespace.values()):
        if isinstance(value, JITFunction):
            _ = value.cache_key  # computed once and kept


# A kernel that is launched before the one in front of it has ended (programmatic dependent launch, Hopper and later).
#
# A decode step is some ten short kernels a layer, and between two of them lies a microsecond or more in which the device starts
# the next. Launched with `overlap()`, a kernel's programs are on the multiprocessors already and wait for the one before to end:
#
#     kernel n      |========|
#     kernel n + 1      |..wait..|========|      instead of     |========|  gap  |========|
#
# `behind_last` is the first thing that such a kernel does with memory: behind it all that came before is written, as kernel n too
# has waited for kernel n - 1. Weights, which nothing writes, may be read ahead of it. A kernel without it is launched as ever. On
# another device, and in the interpreter, OVERLAPS is False and nothing of it is compiled.
#
# Measured (H200, 8B in int8, batch 32): a step of 5.45 ms in place of 5.68.


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
