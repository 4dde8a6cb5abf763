"""`make bench-cpu`: our engine on the CPU beside other engines, side by side, each figure with the machine's limit.

    python -m benchmarks.cpu [--only PARTS] [--rounds N] [--quick] [--peers NAMES] [--fresh]

Each part writes its figures into `benchmarks/results/cpu.json` as soon as it is through, in place of its own older ones; one that
was cut off goes on where it was. The machine should have nothing else to do. Minutes on two cores, all in all some 45, and twice
that where vLLM has no bfloat16 of the processor's own; a part with peers begins no further round of its five when its time after
the first one is over (`--rounds N`: N, however long they last), and the notes of the file say how many rounds each figure has:

    smollm2     8   SmolLM2-135M, each engine in memory and paused between its turns; Python's share of a step
    tinyllama   7   TinyLlama-1.1B, real weights: of this and the next three, one engine is in memory at a time
    llama1b     6   random weights in the shape of Llama 3.2 1B
    llama3b     9   of Llama 3.2 3B
    experts     5   64 experts of which 8 are active, a billion weights
    long        3   decode steps at 8 000 tokens of context
    accuracy    5   perplexity of every format
    start       1   process start to first token, 135 M and 3 B
    memory      1   idle workers

The first run installs the peers into the cache (llama.cpp compiles for ten minutes) and converts the weights for each (a quarter
of an hour, 40 GB of disk). What a run with `--peers` or `--quick` measures is only printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.accuracy import VARIANTS, Sizes, accuracy_figures
from benchmarks.cpu import own
from benchmarks.cpu.cases import Plan
from benchmarks.cpu.parts import PARTS, Found, run
from benchmarks.harness import RESULTS, Figure, Kept, Measured, Options, Suite, say, write_document

_OWN = ("long", "accuracy", "start", "memory")


@dataclass(frozen=True)
class CpuSuite(Suite):
    """A suite whose file says beside the figures what was not measured, and what the contestants say of themselves, by part."""

    found: dict[str, Found] = field(default_factory=dict)

    def save(self, part: str, figures: Sequence[Figure]) -> None:
        """Write the figures, then the rest, in place of the part's own."""
        super().save(part, figures)
        if part in self.found:
            path = RESULTS / f"{self.name}.json"
            write_document(path, with_notes(json.loads(path.read_text()), part, self.found[part]))


def with_notes(document: Mapping[str, object], part: str, found: Found) -> dict[str, object]:
    """Return the document with what was found of a part in place of what it said of that part before. Pure."""

    def merged(key: str, own: Mapping[str, object]) -> dict[str, object]:
        known = document.get(key)
        others = {name: value for name, value in known.items() if _part_of(name) in PARTS} if isinstance(known, dict) else {}
        kept = {name: value for name, value in others.items() if _part_of(name) != part}
        return {**kept, **{f"{part}: {name}": value for name, value in own.items()}}

    notes = {"not_measured": merged("not_measured", found.not_measured), "contestants": merged("contestants", found.notes)}
    return {**document, **notes}


def _part_of(key: str) -> str:
    return key.partition(": ")[0]


SUITE = CpuSuite("cpu", (*PARTS, *_OWN))


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments and the chosen parts; `peers` None: all of them."""
    parser = SUITE.parser(__doc__, fresh="forget what a run that was cut off has measured")
    rounds_help = f"of which the medians are taken, however long they last (default: up to {Plan.rounds}, while there is time)"
    parser.add_argument("--rounds", type=int, help=rounds_help)
    parser.add_argument("--peers", help="parts of names, separated by commas; none: only our own engine (default: all)")
    args = parser.parse_args(argv)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds: {args.rounds} is less than 1; give at least 1")
    args.is_printed = bool(args.peers or args.quick)
    if args.peers:
        args.peers = [part.strip().lower() for part in args.peers.split(",")]
        known = [peer.name for part in PARTS.values() for peer in part.peers]
        if args.peers != ["none"] and not any(part in name.lower() for part in args.peers for name in known):
            parser.error(f"--peers: {','.join(args.peers)} is in no name of {', '.join(dict.fromkeys(known))}")
    try:
        return args, SUITE.chosen(args.only)
    except ValueError as error:
        parser.error(str(error))


def measure(name: str, args: argparse.Namespace, options: Options) -> Measured:
    """Return the figures of a part."""
    if name == "long":
        return own.long_context(options)
    if name == "accuracy":
        few = Sizes(num_windows=1, window_tokens=64, num_prompts=1, prompt_tokens=8, new_tokens=8, decode_batch=1, decode_steps=4)
        return accuracy_figures(options.model, VARIANTS, few if options.quick else None)
    if name == "start":
        return own.starts(options)
    if name == "memory":
        return own.memory(options)
    found = run(PARTS[name], name, options, args.rounds, args.peers)
    SUITE.found[name] = found
    for what, reason in found.not_measured.items():
        say(f"{what}: NOT MEASURED: {reason}")
    return [*found.figures, *(own.python_share(options) if name == "smollm2" else [])]


def main(argv: Sequence[str] | None = None) -> None:
    args, names = parse_args(argv)
    options = Options("cpu-some" if args.peers else "cpu", quick=args.quick)
    for name in names:
        if args.fresh or args.is_printed:
            Kept(options.folder / name).forget()
    SUITE.main(names, lambda name: measure(name, args, options), quick=args.is_printed)


if __name__ == "__main__":
    main()
