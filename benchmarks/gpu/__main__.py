"""`benchmarks/gpu/run.sh`: one GPU in 8 minutes; correctness first, then what matters most, then the peers.

    python -m benchmarks.gpu [--only PART[,PART]] [--output FILE] [--limit SECONDS] [--device cpu --tiny]

Each part is a process with a time of its own (plan.py). What is known is in the file after each part, and the table is printed
also when the run is cut off. `--device cpu --tiny` runs the same code in Triton's interpreter, to see that it runs: its times
mean nothing. Only a run of all parts on a GPU writes `benchmarks/results/gpu.json` by itself.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.arguments import parse_args
from benchmarks.gpu.missing import why_not


def main() -> int:
    """Exit status: 0, 1 (something is not equal, failed, or was left out), 3 (something is missing here)."""
    args = parse_args()
    if reason := why_not(args.device):  # before anything is imported that needs what is missing
        print(f"missing: {reason}", file=sys.stderr)
        return 3
    from benchmarks.gpu.command import run_parts

    return run_parts(args)


if __name__ == "__main__":
    sys.exit(main())
