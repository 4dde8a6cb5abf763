"""`benchmarks/gpu/run.sh`: one GPU in 8 minutes; correctness first, then what matters most, then the peers.

    python -m benchmarks.gpu [--only PART[,PART]] [--output FILE] [--limit SECONDS] [--device cpu --tiny]

Each part is a process with a time of its own (plan.py). What is known is in the file after each part, and the table is printed
also when the run is cut off. `--device cpu --tiny` runs the same code in Triton's interpreter, to see that it runs: its times
mean nothing. Only a run of all parts on a GPU writes `benchmarks/results/gpu.json` by itself.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.missing import missing_modules, why_not

if __name__ == "__main__":
    if missing_modules():  # before anything that needs them is imported
        print(f"missing: {why_not('cpu')}", file=sys.stderr)
        sys.exit(3)
    from benchmarks.gpu.command import main

    sys.exit(main())
