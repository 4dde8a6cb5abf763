"""`make bench-vllm`: vLLM as the engine of workers: equal tokens, figures of a request, other models, others beside it.

    python -m benchmarks.vllm [--only equality,demo,families,side] [--quick]

Parts go to `benchmarks/results/vllm.json` as soon as they are through; a part that was stopped goes on with what it has measured.
"""

from __future__ import annotations

from benchmarks.harness import Options, Suite
from benchmarks.vllm import demo, equality, families, side

PARTS = {"equality": equality.measure, "demo": demo.measure, "families": families.measure, "side": side.measure}
SUITE = Suite("vllm", tuple(PARTS))


def main() -> None:
    """Run the chosen parts."""
    arguments, names = SUITE.arguments(SUITE.parser(__doc__))
    options = Options("vllm", quick=arguments.quick)
    SUITE.main(names, lambda name: PARTS[name](options), quick=arguments.quick)


if __name__ == "__main__":
    main()
