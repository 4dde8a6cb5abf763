"""Programs for instruction tiers that this processor lacks: compiled for its architecture, run by qemu's user mode."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdmesh.engine.kernels.cpu import build, isa

FLAGS = ("-O3", "-std=c++20", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Werror")


@dataclass(frozen=True)
class Target:
    """One architecture whose programs can be compiled and run here; `runner` is empty where the processor runs them itself."""

    compiler: tuple[str, ...]
    runner: tuple[str, ...] = ()

    def compile(self, tier: isa.Tier, sources: Sequence[Path], program: Path, *options: str) -> None:
        """Compile a program of these sources, with the kernels' headers at hand, for a tier. Warnings are errors."""
        flags = (*FLAGS, *tier.flags, tier.define, *options, f"-I{build.SOURCES}")
        link = ("-static",) if self.runner else ()  # what the emulator runs needs no libraries of its architecture
        command = [*self.compiler, *flags, *map(str, sources), *link, "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"

    def run(self, program: Path, *arguments: str, given: bytes = b"") -> bytes:
        """Return what the program prints."""
        return subprocess.run([*self.runner, str(program), *arguments], input=given, stdout=subprocess.PIPE, check=True).stdout


def target_of(tier: isa.Tier) -> Target:
    """Return how programs of a tier run here: by the processor if it has the tier, else by qemu. Skip the test if neither can."""
    if tier in isa.supported():
        try:
            return Target(build.Compiler.find().command)
        except build.NoCompiler as error:
            pytest.skip(str(error))
    if tier in isa.compilable("aarch64"):
        return _emulated("aarch64-linux-gnu-g++", "qemu-aarch64", "g++-aarch64-linux-gnu qemu-user")
    if tier.name == "avx2" and platform.machine() == "x86_64":
        return _emulated("g++", "qemu-x86_64", "g++ qemu-user")
    pytest.skip(f"this processor does not have {tier.name}, and qemu does not emulate it")


def _emulated(compiler: str, emulator: str, packages: str) -> Target:
    found = [shutil.which(compiler), shutil.which(emulator)]
    if None in found:
        pytest.skip(f"{compiler} or {emulator} is not on PATH: apt install {packages}")
    return Target((str(found[0]),), (str(found[1]), "-cpu", "max"))
