"""Which parts there are, in which order, and how long each may take. Pure: seconds in, a decision out.

    | machine | compile | kernels | greedy | decode | attention | rows | prefill | handoff | batching | generate | mesh |   480 s
      what it can         correctness          the most important figures                 peers

Each part is a process of its own (`part.py`), so that one that fails, hangs or leaves the GPU in a bad state costs its own
figures alone. What a part leaves of its time goes to the next one; where time is short the last parts go without.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 480.0
NOT_EQUAL = 4
"""Exit status of a part that found something that was not equal: 1 is Python's for an error that nobody caught."""
RESERVE_S = 8.0
"""Of the limit: for the table, the file, and the end of a part that did not end by itself."""
LEAST_S = 5.0
"""A part with less is not begun: its process would hardly have imported torch."""


@dataclass(frozen=True)
class Part:
    """`budget_s`: what it needs at least, its process's start included; kernels are compiled by then (`compile`)."""

    name: str
    budget_s: float
    does: str


PARTS = (
    Part("machine", 18, "copy bandwidth and the peak of products"),
    Part("compile", 44, "every kernel of the others, by all cores"),
    Part("kernels", 20, "every kernel against the reference"),
    Part("greedy", 32, "greedy tokens of graphs, of single launches, and of steps ahead"),
    Part("decode", 90, "decode steps: 1B in bf16, 8B in bf16, int8, int4 and fp8; KV in fp8; how busy the GPU is"),
    Part("attention", 26, "split and unsplit attention over a long context, prefill attention; torch and FlashInfer beside"),
    Part("rows", 16, "a row's bits in batches of 1 to 256, and what that costs beside cuBLAS"),
    Part("prefill", 26, "a long prompt against the peak of products"),
    Part("handoff", 35, "1 GB of keys and values to another process on this GPU, alone and beside its prefill"),
    Part("batching", 70, "8B, many sequences, beside transformers' continuous batching"),
    Part("generate", 55, "1B, one sequence, beside transformers' generate with a static cache, compiled"),
    Part("mesh", 40, "router, prefill and decode worker on this GPU"),
)


def chosen(names: Sequence[str]) -> tuple[Part, ...]:
    """The parts of these names in the order of PARTS; all, for no names. Raises ValueError for one that is not known."""
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise ValueError(f"only: there is no part {name!r}; there are {', '.join(known)}")
    return tuple(part for part in PARTS if not names or part.name in names)


def allotment_s(part: Part, later: Sequence[Part], left_s: float) -> float | None:
    """How long a part may take with `left_s` seconds until the limit, and these parts behind it; None: it has no time.

    At least its budget if there is so much, and what those behind it do not need.
    """
    left_s -= RESERVE_S
    spare = left_s - sum(other.budget_s for other in later)
    granted = min(left_s, max(part.budget_s, spare))
    return granted if granted >= LEAST_S else None


# The command line. Imports nothing that a bare machine may lack.


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description="Correctness and speed on one GPU, in 8 minutes.")
    parser.add_argument("--only", default="", metavar="PART[,PART]", help=f"of {names} (default: all)")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: benchmarks/results/gpu.json for a whole run on a GPU, else none)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what the file has of parts that were done on such a GPU, and run the others"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of the whole run (default: %(default)g)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that Triton's interpreter bears; needed with --device cpu")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # Unix seconds: run.sh has used some of the limit
    args = parser.parse_args(argv)
    args.names = [name for name in args.only.split(",") if name]
    try:
        args.parts = chosen(args.names)
    except ValueError as error:
        parser.error(str(error))
    if args.limit <= 0:
        parser.error(f"--limit: {args.limit:g} is no time; give seconds")
    if args.device == "cpu" and not args.tiny:
        parser.error("--tiny: needed with --device cpu, as Triton's interpreter is some thousand times slower than a GPU")
    return args
