"""What instructions a processor has, by the names that Linux gives them: from /proc/cpuinfo, or from sysctl on macOS."""

from __future__ import annotations

import subprocess

LEAST = {
    "x86_64": frozenset({"avx2", "fma", "f16c"}),
    "aarch64": frozenset({"asimddp"}),
    "arm64": frozenset({"asimddp"}),  # macOS
}
"""What the CPU kernels need, by machine architecture, to be faster than portable code."""

_SYSCTL_NAMES = {
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.fma": "fma",
    "hw.optional.f16c": "f16c",
}


def listed(cpuinfo: str) -> frozenset[str]:
    """Return the features of the first processor in the content of /proc/cpuinfo ("flags" on x86, "Features" on ARM): all
    processors of one machine have the same. The kernel omits what programs may not use."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def asked() -> frozenset[str]:
    """Return the features that macOS tells; none on other systems."""
    lines = (line.partition(":") for line in sysctl(*_SYSCTL_NAMES).splitlines())
    return frozenset(_SYSCTL_NAMES[name] for name, _, value in lines if name in _SYSCTL_NAMES and value.strip() == "1")


def sysctl(*names: str) -> str:
    """Return the lines "name: value" of those names that this macOS knows; nothing on other systems."""
    try:
        return subprocess.run(["/usr/sbin/sysctl", *names], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
