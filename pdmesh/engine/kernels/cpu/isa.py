"""Instruction tiers: for which processors the kernels are compiled, and which of them this processor has.

A library is compiled for one tier as a whole, and one is loaded. PDMESH_CPU_ISA forces a tier, for tests and comparisons.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdmesh.platform import fallbacks, linux
from pdmesh.platform.capabilities import CPU_TIERS

VARIABLE = "PDMESH_CPU_ISA"


def _may_use_tiles() -> bool:
    """Return whether the system lets this process use matrix tiles. It has to be asked before a thread uses them."""
    try:
        linux.request_matrix_tiles()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Tier:
    """One set of instructions."""

    name: str
    needs: frozenset[str]  # names under "flags" or "Features" in /proc/cpuinfo, where the kernel omits what programs may not use
    flags: tuple[str, ...]  # options of GCC and Clang
    equals: str = ""  # the tier that gives the same bits, where there is one
    may_run: Callable[[], bool] = lambda: True  # asked where the processor has what it needs: the system may refuse it

    @property
    def mode(self) -> str:
        """Return the name of the tier's bits, which a numeric mode has: workers whose tiers give the same bits are one mesh."""
        return self.equals or self.name

    @property
    def define(self) -> str:
        """Return the compiler option by which the sources see the tier: -DPDMESH_ISA_AVX2=1."""
        return f"-DPDMESH_ISA_{self.name.upper()}=1"


_AVX2 = Tier("avx2", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c"))
_AVX_VNNI = Tier("avx_vnni", _AVX2.needs | {"avx_vnni"}, (*_AVX2.flags, "-mavxvnni"), equals=_AVX2.name)
_AVX512_VNNI = Tier(
    "avx512_vnni",
    _AVX2.needs | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    (*_AVX2.flags, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512",
     # GCC 12 warns of undefined operands inside its own AVX-512 header (its bug 105593): megabytes of warnings.
     "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)  # fmt: skip
_AVX512_BF16 = Tier("avx512_bf16", _AVX512_VNNI.needs | {"avx512_bf16"}, (*_AVX512_VNNI.flags, "-mavx512bf16"))
# The kernels name the tiles in assembly: no option of the compiler is needed.
_AMX = Tier("amx", _AVX512_BF16.needs | {"amx_tile", "amx_int8", "amx_bf16"}, _AVX512_BF16.flags, may_run=_may_use_tiles)
# Before registers are given out GCC puts loads first, and then spills sums.
_NEON_FLAGS = ("-fno-schedule-insns",)
_NEON_DOTPROD = Tier("neon_dotprod", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod", *_NEON_FLAGS))
_NEON_BF16 = Tier("neon_bf16", _NEON_DOTPROD.needs | {"i8mm", "bf16"}, ("-march=armv8.2-a+dotprod+i8mm+bf16", *_NEON_FLAGS))
_PORTABLE = Tier("portable", frozenset(), ())

_X86_64 = (_AMX, _AVX512_BF16, _AVX512_VNNI, _AVX_VNNI, _AVX2)
_ARM64 = (_NEON_BF16, _NEON_DOTPROD)
TIERS = (*_X86_64, *_ARM64, _PORTABLE)  # best first
_OF_MACHINES = {"x86_64": _X86_64, "aarch64": _ARM64, "arm64": _ARM64}  # arm64: macOS


def by_name(name: str) -> Tier:
    """Return the tier of this name. ValueError, with the existing names, for any other."""
    for tier in TIERS:
        if tier.name == name:
            return tier
    raise ValueError(f"{name!r} is no instruction tier; choose one of {_names(TIERS)}")


def compilable(machine: str | None = None) -> tuple[Tier, ...]:
    """Return the tiers that a compiler of this machine architecture knows, best first; the processor need not have them."""
    return (*_OF_MACHINES.get(machine or platform.machine(), ()), _PORTABLE)


def supported(cpuinfo: Path = fallbacks.CPUINFO, machine: str | None = None) -> tuple[Tier, ...]:
    """Return the tiers that this processor has and the system lets this process use, best first. "portable" is always among
    them, and alone where nothing else is known: other architectures than x86-64 and ARM64, and systems without /proc/cpuinfo but
    macOS."""
    return tuple(tier for tier in _of_processor(cpuinfo, machine) if tier.may_run())


def refused(cpuinfo: Path = fallbacks.CPUINFO, machine: str | None = None) -> tuple[Tier, ...]:
    """Return the tiers that this processor has, but that the system does not let this process use, best first."""
    return tuple(tier for tier in _of_processor(cpuinfo, machine) if not tier.may_run())


def _of_processor(cpuinfo: Path, machine: str | None) -> tuple[Tier, ...]:
    if CPU_TIERS.is_taken:
        return (_PORTABLE,)
    present = fallbacks.processor_features(cpuinfo)
    return tuple(tier for tier in compilable(machine) if tier.needs <= present)


def detect(environment: Mapping[str, str] | None = None, tiers: tuple[Tier, ...] | None = None) -> Tier:
    """Return the tier to run: the one that PDMESH_CPU_ISA names, else the best of `tiers` (default: of this processor).

    ValueError, naming the variable, for a name that is no tier, and for a tier that the processor lacks.
    """
    forced = (os.environ if environment is None else environment).get(VARIABLE)
    tiers = supported() if tiers is None else tiers
    if not forced:
        return tiers[0]
    try:
        tier = by_name(forced)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    if tier not in tiers:
        reason = "the system does not let this process use" if tier in refused() else "this processor does not have"
        raise ValueError(f"{VARIABLE}: {reason} {forced}; choose one of {_names(tiers)}, or unset it")
    return tier


def _names(tiers: tuple[Tier, ...]) -> str:
    return ", ".join(tier.name for tier in tiers)
