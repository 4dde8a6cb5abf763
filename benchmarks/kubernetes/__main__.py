"""`make bench-k8s`: pdmesh behind a gateway and in a cluster, part by part, into benchmarks/results/kubernetes.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.harness import MODEL, Measured, Options, Suite
from benchmarks.kubernetes import picking, prefixes, sleep, weights

PARTS: Mapping[str, Callable[[Options], Measured]] = {
    "picking": picking.figures,
    "prefixes": prefixes.figures,
    "weights": weights.figures,
    "sleep": sleep.figures,
}
SUITE = Suite("kubernetes", tuple(PARTS), {"model": MODEL})


def main() -> None:
    arguments, names = SUITE.arguments(SUITE.parser(__doc__))
    options = Options("kubernetes", arguments.quick)
    SUITE.main(names, lambda name: PARTS[name](options), quick=options.quick)


if __name__ == "__main__":
    main()
