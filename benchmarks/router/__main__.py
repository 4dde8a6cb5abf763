"""`make bench-router`: all parts, or those that `--only` names, one after the other. Each adds its figures to those of the others
in benchmarks/results/router.json as soon as it is through; the mixes go on where they were interrupted.
"""

from __future__ import annotations

import importlib

from benchmarks.harness import MODEL, Kept, Measured, Options, Suite
from benchmarks.peers.servers import watched_shared_memory

# In the order of what they promise. Each is a module here with `figures(options)`.
PARTS = ("mixes", "peers", "interference", "overhead", "prediction", "overload", "kill", "prefix")
SUITE = Suite("router", PARTS, {"model": MODEL})


def main() -> None:
    parser = SUITE.parser(__doc__, fresh="forget what an interrupted run had measured")
    arguments, names = SUITE.arguments(parser)
    options = Options("router", arguments.quick)
    if arguments.fresh or arguments.quick:
        for name in names:
            Kept(options.folder / name).forget()

    def measure(name: str) -> Measured:
        part = importlib.import_module(f"benchmarks.router.{name}")
        # It needs no model.
        found: Measured = part.figures(quick=options.quick) if name == "overhead" else part.figures(options)
        return found

    with watched_shared_memory():
        SUITE.main(names, measure, quick=options.quick)


if __name__ == "__main__":
    main()
