"""One part in a process of its own: `python -m benchmarks.gpu.part NAME --sink FILE …`, started by `__main__.py`.

Exit status: 0, NOT_EQUAL, or what Python or the driver make of a part that broke.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import NOT_EQUAL

# Which kernels a process had to compile because nobody had done it ahead (parts/compile.py).


class FreshKernels:
    """Counts what Triton's compiler makes in this process from now on; those that it finds on the disk are not among them."""

    def __init__(self) -> None:
        from triton import knobs

        self._names = Counter[str]()
        self._seconds = 0.0
        knobs.compilation.listener = self._heard

    def _heard(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self._names[str(src.name)] += 1
            self._seconds += times.total / 1e6

    def words(self) -> str:
        """Empty: none."""
        if not self._names:
            return ""
        listed = ", ".join(f"{count} {name}" for name, count in self._names.most_common())
        return f"compiled only now, {self._seconds:.1f} s: {listed}"


BEGAN = time.monotonic()
END_S = 2.0
"""Of a part's time: for its process to end. What its imports took counts, too."""
COMPILES = "compile"
"""The part that compiles for a GPU also where there is none; the others interpret kernels there."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--sink", type=Path, required=True, help="file that gets a line of JSON for each figure")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--bandwidth", type=float, help="GB/s, as measured; with --peak")
    parser.add_argument("--peak", type=float, help="10^12 operations/s")
    parser.add_argument("--capability", type=int, default=90, help="as CUDA counts, 90: of Hopper")
    return parser.parse_args(argv)


def prepare_interpreter() -> None:
    """Before anything imports triton: on a CPU its kernels run in the interpreter, which the tests know how to set up."""
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("tests.engine.kernels.triton.conftest")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.device == "cuda":
        return _run(args)
    if args.name != COMPILES:
        prepare_interpreter()
        return _run(args)
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(prefix="pdmesh-gpu-kernels-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nobody launches them here
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from benchmarks.gpu.context import Context, Deadline
    from benchmarks.gpu.part import FreshKernels
    from benchmarks.gpu.shapes import FULL, TINY
    from pdmesh.engine.hardware import MachineLimits

    limits = MachineLimits(args.peak * 1e12, args.bandwidth * 1e9) if args.peak and args.bandwidth else None
    scale = TINY if args.tiny else FULL
    context = Context(
        args.device, scale, Deadline(args.seconds - END_S - (time.monotonic() - BEGAN)), args.sink, limits, args.capability
    )
    fresh = FreshKernels() if args.device == "cuda" and args.name != COMPILES else None
    try:
        importlib.import_module(f"benchmarks.gpu.parts.{args.name}").run(context)
    finally:
        if fresh is not None and (words := fresh.words()):
            context.note(f"{args.name}: {words}")
    return NOT_EQUAL if context.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
