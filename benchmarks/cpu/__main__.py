"""`make bench-cpu`: our engine on the CPU beside other engines, side by side in one run, each figure with the machine's limit.

    python -m benchmarks.cpu [--rounds N] [--peers vllm,llama] [--quick] [--no-accuracy]

Peers are installed into the cache by the first run. A whole run writes `benchmarks/results/cpu.json`; one with fewer peers or
sizes only prints. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy import VARIANTS, accuracy_figures
from benchmarks.cpu.cases import Measured, Plan, measure, measure_starts
from benchmarks.cpu.contest import Contest
from benchmarks.cpu.figures import Results, all_figures
from benchmarks.cpu.limits import MachineLimits, ModelSizes
from benchmarks.cpu.prompts import Prompts
from benchmarks.cpu.table import all_with_goals, left_out, side_by_side
from benchmarks.harness import Figure, say, write
from benchmarks.peers.catalogue import OURS, PEERS, Contestant
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model
from pdmesh.text.tokenizer import Tokenizer

QUICK = Plan(rounds=1, starts=1, batches=(1, 4), new_tokens=32, long_context=2000)


@dataclass(frozen=True)
class Run:
    """What one run found; `notes` go into the document beside the figures."""

    results: Results
    reasons: Mapping[str, str]
    notes: Mapping[str, object]


def run(folder: Path, contestants: Sequence[Contestant], plan: Plan) -> Run:
    """Speeds first, with all processes there, then starts, with none."""
    with Contest(DEFAULT_MODEL, plan.max_context, Prompts(Tokenizer.load(folder))) as contest:
        contest.admit(contestants)
        speeds = measure(contest, plan)
        contest.close()
        starts = measure_starts(contest, plan)
    medians = speeds.medians | starts.medians
    results = Results(
        plan=plan,
        sizes=ModelSizes.read(folder),
        contestants=[seat.contestant for seat in contest.seats],
        medians=medians,
        about={seat.contestant.name: seat.child.about for seat in contest.seats},
        limits=MachineLimits.of(medians),
    )
    return Run(results, contest.absent | speeds.failures | starts.failures, _notes(contest, speeds, starts))


def _notes(contest: Contest, *measured: Measured) -> dict[str, object]:
    return {
        "contestants": {seat.contestant.name: {**seat.child.about, "answer": seat.answer} for seat in contest.seats},
        "samples": {name: values for part in measured for name, values in part.samples.items()},
    }


def report(found: Run, figures: Sequence[Figure]) -> None:
    """The tables, for a person."""
    names = [contestant.name for contestant in found.results.contestants]
    say("\n" + side_by_side(names, found.results.medians, found.results.plan))
    say("\n" + all_with_goals(figures))
    for line in left_out(found.reasons):
        say(line)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """`peers` comes back as the chosen ones of PEERS."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="of which the medians are taken (default: %(default)s)")
    parser.add_argument("--peers", help="parts of names, separated by commas; none: only our own engine (default: all)")
    parser.add_argument("--quick", action="store_true", help="one round, two batch sizes, few tokens: to see that all works")
    parser.add_argument("--no-accuracy", action="store_true", help="leave out what each format costs in quality")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds: {args.rounds} is less than 1; give at least 1")
    args.is_whole = not (args.peers or args.quick or args.no_accuracy)
    parts = [part.strip().lower() for part in args.peers.split(",")] if args.peers else [""]
    args.peers = [peer for peer in PEERS if any(part in peer.name.lower() for part in parts)]
    if not args.peers and parts != ["none"]:
        parser.error(f"--peers: {','.join(parts)} is in no name of {', '.join(peer.name for peer in PEERS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    folder = ensure_model(DEFAULT_MODEL, say)
    found = run(folder, [*OURS, *args.peers], QUICK if args.quick else Plan(rounds=args.rounds))
    figures = all_figures(found.results)
    if not (args.quick or args.no_accuracy):
        figures += accuracy_figures(folder, VARIANTS)
    if args.is_whole:
        write("cpu", figures, model=DEFAULT_MODEL, not_measured=found.reasons, **found.notes)
    report(found, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
