"""`make bench-cpu`: our engine on the CPU beside other engines, side by side in one run, each figure with the machine's limit.

    python -m benchmarks.cpu [--rounds N] [--peers vllm,llama] [--quick] [--no-accuracy]

Peers are installed into the cache by the first run. A whole run writes `benchmarks/results/cpu.json`; one with fewer peers or
sizes only prints. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy import VARIANTS, accuracy_figures
from benchmarks.cpu.contest import (
    Contest,
    MachineLimits,
    ModelSizes,
    Plan,
    Prompts,
    decode_case,
    measure,
    measure_starts,
    prefill_case,
)
from benchmarks.cpu.figures import Results, all_figures
from benchmarks.harness import Figure, aligned, parser_of, say, table, write
from benchmarks.peers.environments import OURS, PEERS, Contestant
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model
from pdmesh.text.tokenizer import Tokenizer

# What a person reads at the end of `make bench-cpu`: everybody side by side, then each figure with its goal and limit.


def side_by_side(names: Sequence[str], medians: Mapping[str, float], plan: Plan) -> str:
    """Tokens a second, a line per contestant."""
    sizes = {f"batch {batch}": [decode_case(name, batch) for name in names] for batch in plan.batches}
    sizes[f"prefill {plan.prefill_tokens}"] = [prefill_case(name, plan.prefill_tokens) for name in names]
    columns = [[label, *(f"{medians[case]:.0f}" if case in medians else "-" for case in cases)] for label, cases in sizes.items()]
    return "\n".join(aligned(list(zip(["tokens/s", *names], *columns, strict=True))))


def all_with_goals(figures: Sequence[Figure]) -> str:
    """A line per figure."""
    return "\n".join(table(figures, "met"))


def left_out(reasons: Mapping[str, str]) -> Iterator[str]:
    for name, reason in reasons.items():
        yield f"{name}: NOT MEASURED: {reason}"


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
    return Run(results, contest.absent | speeds.failures | starts.failures, _notes(contest))


def _notes(contest: Contest) -> dict[str, object]:
    return {"contestants": {seat.contestant.name: {**seat.child.about, "answer": seat.answer} for seat in contest.seats}}


def report(found: Run, figures: Sequence[Figure]) -> None:
    """The tables, for a person."""
    names = [contestant.name for contestant in found.results.contestants]
    say("\n" + side_by_side(names, found.results.medians, found.results.plan))
    say("\n" + all_with_goals(figures))
    for line in left_out(found.reasons):
        say(line)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """`peers` comes back as the chosen ones of PEERS."""
    parser = parser_of("benchmarks.cpu", __doc__)
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
