"""Compiles kernels as for a GPU, on a machine without one: `python -m tests.engine.kernels.triton.hopper GROUP [capability]`.

One line of JSON a kernel. The interpreter takes Python that the compiler refuses, and says nothing of registers, shared memory,
or what a number that is 1 or odd makes of a kernel. Groups are those of launches.py, or `one_of_each`: one variant of every
kernel, in half a minute instead of three. Needs Triton with its assembler.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable

from tests.engine.kernels.triton.arrivals import lacking
from tests.engine.kernels.triton.cubins import usage_of
from tests.engine.kernels.triton.launches import GROUPS
from tests.engine.kernels.triton.recording import HOPPER, Variant, recording

_BARRIER = re.compile(r"\b(?:gpu|ttg)\.barrier\b")  # that a kernel's source asks for


def line_of(variant: Variant, capability: int) -> dict[str, object]:
    started = time.perf_counter()
    kernel = variant.compiled(capability)
    seconds = round(time.perf_counter() - started, 1)
    sizes = {name: value for name, value in variant.sizes.items() if name.isupper()}
    measured = {"shared": kernel.metadata.shared, **usage_of(kernel.asm["cubin"])._asdict(), "seconds": seconds}
    measured["approximate_divisions"] = kernel.asm["ptx"].count("div.full")
    ordered = {"barriers": len(_BARRIER.findall(kernel.asm["ttir"])), "lacking": lacking(kernel.asm["ptx"])}
    return {"kernel": variant.name, **sizes, "num_stages": variant.options["num_stages"], **measured, **ordered}


def one_of_each(variants: Iterable[Variant]) -> list[Variant]:
    """The first of every kernel, and of those that store in float8."""
    return list({(each.name, each.sizes.get("HAS_SCALES")): each for each in reversed(list(variants))}.values())


def main(group: str, capability: int = HOPPER) -> None:
    with recording(capability) as recorder:
        for launches in GROUPS.values() if group == "one_of_each" else [GROUPS[group]]:
            launches()
    variants = list(recorder.variants.values())
    for variant in one_of_each(variants) if group == "one_of_each" else variants:
        print(json.dumps(line_of(variant, capability)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
