"""The command line. Imports nothing that a bare machine may lack."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.plan import LIMIT_S, PARTS, chosen


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description="Correctness and speed on one GPU, in 8 minutes.")
    parser.add_argument("--only", default="", metavar="PART[,PART]", help=f"of {names} (default: all)")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: benchmarks/results/gpu.json for a whole run on a GPU, else none)"
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
