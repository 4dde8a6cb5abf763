"""`make bench-router`: all parts, or those that `--only` names, one after the other. Each adds its figures to those of the others
in benchmarks/results/router.json as soon as it is through; the mixes go on where they were interrupted. `--only mixes --mix NAME`
shows the figures of some mixes, in minutes, and writes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.harness import MODEL, Kept, Measured, Options, Suite
from benchmarks.peers.servers import watched_shared_memory
from benchmarks.router import disturbances, lending, long_prompts, mixes, overhead, overload, peers, placement

# In the order of what they promise.
PARTS: Mapping[str, Callable[[Options], Measured]] = {
    "mixes": mixes.figures,
    "peers": peers.figures,
    "lending": lending.figures,
    "interference": disturbances.figures,
    "overhead": lambda options: overhead.figures(quick=options.quick),
    "prediction": placement.prediction_figures,
    "overload": overload.figures,
    "kill": disturbances.kill_figures,
    "prefix": placement.figures,
    "long-prompts": long_prompts.figures,
}
SUITE = Suite("router", tuple(PARTS), {"model": MODEL})


def main() -> None:
    parser = SUITE.parser(__doc__, fresh="forget what an interrupted run had measured")
    parser.add_argument("--mix", action="append", default=[], metavar="NAME", help="measure this mix, no other; write no results")
    arguments, names = SUITE.arguments(parser)
    try:
        chosen = mixes.named(arguments.mix)
    except ValueError as error:
        parser.error(f"--mix: {error}")
    parts: dict[str, Callable[[Options], Measured]] = {**PARTS, "mixes": lambda options: mixes.figures(options, chosen)}
    options = Options("router-chosen" if arguments.mix else "router", arguments.quick)
    if arguments.fresh or arguments.quick:
        for name in names:
            Kept(options.folder / name).forget()
    with watched_shared_memory():
        SUITE.main(names, lambda name: parts[name](options), quick=options.quick or bool(arguments.mix))


if __name__ == "__main__":
    main()
