"""Which layout of a machine's cores is expected to serve best, beside the one that was asked for, and why. Pure.

The rules are those that `make bench-router` shows (`mixes` and `lending` in benchmarks/results/router.json): where a prompt and
answers each have a core, answers go on while prompts are computed, which costs a prompt alone next to nothing as long as it may
use the cores of a decode worker that has nothing to do.
"""

from __future__ import annotations

from pdmesh.launcher.plan import LocalMeshConfig, num_threads
from pdmesh.worker.engines.registry import DEFAULT_ENGINE

SEPARATED = "--prefill 1 --decode 1"
BOTH = "--prefill 0 --decode 0 --both 1"
ALONE_TIMES = 1.4
"""How much longer a prompt of 420 tokens alone takes on one of two cores, as measured (1.37)."""


def expectation(config: LocalMeshConfig, num_cores: int) -> str:
    """Return a line for the user; empty where nothing is known: other engines than ours, and GPUs, on which workers share a
    device."""
    if config.engine != DEFAULT_ENGINE or config.device != "cpu":
        return ""
    if num_cores < config.num_workers:
        return _better(BOTH, f"{config.num_workers} workers share {_cores(num_cores)}, so nothing is computed side by side")
    if config.num_workers == 1:
        if num_cores == 1:
            return "layout: one worker with both roles, which is expected to serve best on one core"
        return _better(SEPARATED, "with one worker for both roles, answers wait while prompts are computed")
    if not (config.num_prefill and config.num_decode):
        return _better(SEPARATED, "with both roles on each worker, its answers wait while it computes prompts")
    each = num_threads(config, range(num_cores))
    if each * config.num_workers > num_cores:
        fewer = f"--threads {num_cores // config.num_workers}"
        return _better(fewer, f"{config.num_workers} workers of {each} threads on {_cores(num_cores)} wait for each other")
    if config.has_lending:
        return "layout: expected to serve best, as answers go on while prompts are computed, and cores without work are lent"
    return _better(
        "--lend-cores",
        f"each worker computes on {_cores(each)} only, and a prompt alone takes up to {ALONE_TIMES:g} times as long",
    )


def _better(flags: str, why: str) -> str:
    return f"layout: {flags} is expected to serve better: {why}"


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"
