"""`make bench-mesh`: one engine alone, then behind router and workers. All parts, or those that `--only` names; each adds its
figures to those of the others in benchmarks/results/mesh.json as soon as it is through. Minutes, all in all twelve:

    engine      5   one engine on all cores, in int8, which is the default, and in float32
    single      3   single requests through router, prefill and decode worker, beside the engine
    batches     3   TPOT through the router over the engine's own at batch 1 and 16, and CPU of router and worker
    workers     1   two workers of a core each beside one of two
"""

from __future__ import annotations

from benchmarks.harness import Measured, Options, Suite
from benchmarks.mesh import batches, single

SUITE = Suite(
    "mesh", ("engine", "single", "batches", "workers"), {"model": "SmolLM2-135M-Instruct; int8 weights (the default) and float32"}
)


def main() -> None:
    arguments, names = SUITE.arguments(SUITE.parser(__doc__))
    options = Options("mesh", quick=arguments.quick)

    def measure(part: str) -> Measured:
        if part == "engine":
            return single.engine_figures(options)
        if part == "single":
            return single.measure(options)
        return batches.measure_batches(options) if part == "batches" else batches.measure_workers(options)

    SUITE.main(names, measure, quick=arguments.quick)


if __name__ == "__main__":
    main()
