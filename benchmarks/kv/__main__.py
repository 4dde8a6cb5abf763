"""`make bench-kv`: what KV is worth that stays: fetched from other workers, and restored from tiers. All parts, or those that
`--only` names; each adds its figures to those of the others in benchmarks/results/kv.json as soon as it is through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.harness import MODEL, Measured, Suite
from benchmarks.kv import conversations, costs, real_trace, sessions, shared, tiers

PARTS: Mapping[str, Callable[[], Measured]] = {
    "conversations-1+1": partial(conversations.figures, 1),
    "conversations-2+2": partial(conversations.figures, 2),
    "sessions-1+1": partial(sessions.figures, 1),
    "sessions-2+2": partial(sessions.figures, 2),
    "sessions-vllm": sessions.peer_figures,
    "shared": shared.figures,
    "tiers": tiers.figures,
    "costs": costs.figures,
    "trace": real_trace.figures,
}
SUITE = Suite("kv", tuple(PARTS), {"model": MODEL})


def main() -> None:
    arguments, names = SUITE.arguments(SUITE.parser(__doc__))
    SUITE.main(names, lambda name: PARTS[name](), quick=arguments.quick)


if __name__ == "__main__":
    main()
