"""What an assembled kernel puts away in local memory, and where: read from its machine code by the tools that come with Triton.

A spill does not show in PTX, where registers are without number. In machine code it is a store (STL) and later a load (LDL) on
the stack. Outside of loops it costs once; in an innermost loop each time around.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*);")
_BRANCH = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")
_LOCAL = re.compile(r"\b(LDL|STL)\b")


class Usage(NamedTuple):
    registers: int  # of a thread
    stack: int  # bytes of a thread
    spills: int  # instructions that load from the stack or store there
    inner_spills: int  # of them, those in loops that hold no other loop


def usage_of(cubin: bytes) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources, code = _said("cuobjdump", "-res-usage", file.name), _said("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", resources)
    assert found, resources
    return Usage(int(found[1]), int(found[2]), *count_spills(code))


def count_spills(code: str) -> tuple[int, int]:
    """All, and those in innermost loops. A loop: from a label to a branch back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in code.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.search(line):
            instructions.append(instruction[1])
    loops = _innermost(instructions, labels)
    spills = [at for at, instruction in enumerate(instructions) if _LOCAL.search(instruction)]
    return len(spills), sum(any(first <= at <= last for first, last in loops) for at in spills)


def _innermost(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    branches = ((at, _BRANCH.search(instruction)) for at, instruction in enumerate(instructions))
    loops = {(labels[found[1]], at) for at, found in branches if found and labels.get(found[1], at + 1) <= at}
    return [loop for loop in loops if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)]


def _said(tool: str, *arguments: str) -> str:
    return subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True).stdout
