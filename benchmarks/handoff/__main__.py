"""`make bench-handoff`: what moving KV costs between two processes, beside what the machine allows in the same run.

    python -m benchmarks.handoff [PART ...] [--rounds N]

Only a run of all parts writes `benchmarks/results/handoff.json`; others print. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.handoff.exposed import exposed_figures
from benchmarks.handoff.first import first_figures
from benchmarks.handoff.reserve import reserve_figures
from benchmarks.handoff.throughput import throughput_figures
from benchmarks.harness import Figure, parser_of, show, write

# Each gets the number of rounds and returns its figures.
PARTS: Mapping[str, Callable[[int], list[Figure]]] = {
    "throughput": throughput_figures,
    "exposed": exposed_figures,
    "first": first_figures,
    "reserve": reserve_figures,
}
ROUNDS = 7


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("benchmarks.handoff", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of which the medians are taken (default: %(default)s)")
    args = parser.parse_args(argv)
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.rounds < 1:
        parser.error(f"--rounds: {args.rounds} is less than 1; give at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    figures = [figure for part in args.parts or PARTS for figure in PARTS[part](args.rounds)]
    if args.parts:
        show(figures)
    else:
        write("handoff", figures, layout="of SmolLM2-135M, 256 MB of KV")
    return 0


if __name__ == "__main__":
    sys.exit(main())
