"""Which layout of a machine's cores is expected to serve best, beside the one that was asked for, and why. Pure.

The rules are those that `make bench-router` shows (`mixes` and `lending` in benchmarks/results/router.json): where prompts and
answers each have a core, answers go on while prompts are computed, which costs a prompt alone next to nothing as long as it may
use the cores of a decode worker that has nothing to do. In most mixes measured on two cores that was no worse than the better of
two aggregated deployments: not in all (0.84 and 0.96 times the goodput), and no other number of cores was measured.
Both workers of these mixes had both roles, and the router decided for each request whether one computes for the other.
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
    if num_cores > 1 and (waits := _waiting_answers(config)):
        return waits
    if other_threads := _other_threads(config, num_cores):
        return other_threads
    if config.num_workers == 1:
        return "layout: one worker for prompts and answers, which is expected to serve best on one core"
    if config.has_lending:
        return (
            "layout: expected to serve best, as in most mixes measured on two cores: answers go on while prompts are computed, "
            "and cores without work are lent"
        )
    each = num_threads(config, range(num_cores))
    return _better(
        "--lend-cores",
        f"each worker computes on {_cores(each)} only, and a prompt alone takes up to {ALONE_TIMES:g} times as long",
    )


def _waiting_answers(config: LocalMeshConfig) -> str:
    """Return what is better where a worker computes prompts and answers; empty where each computes one of both. Decode workers
    compute prompts where there is no prefill worker."""
    if config.num_workers == 1:
        return _better(SEPARATED, "with one worker for prompts and answers, answers wait while prompts are computed")
    if not config.num_prefill:
        return _better(SEPARATED, "with prompts and answers on each worker, its answers wait while it computes prompts")
    if config.num_both:
        flags = "--both 0" if config.num_decode else SEPARATED
        return _better(flags, "the answers of a worker with both roles wait while it computes prompts")
    return ""


def _other_threads(config: LocalMeshConfig, num_cores: int) -> str:
    """Return which number of threads is better where some would wait for each other, or cores would have none; else empty. Cores
    that are left when they are divided by the workers do not count."""
    each, workers = num_threads(config, range(num_cores)), config.num_workers
    found = "one worker" if workers == 1 else f"{workers} workers"
    found += " of one thread" if each == 1 else f" of {each} threads"
    if each * workers > num_cores:
        return _better(f"--threads {num_cores // workers}", f"{found} on {_cores(num_cores)} wait for each other")
    share = num_cores // config.num_sharing
    if each < share:
        left = num_cores - each * workers
        return _better(f"--threads {share}", f"{found} leave {left} of {_cores(num_cores)} without work")
    return ""


def _better(flags: str, why: str) -> str:
    return f"layout: {flags} is expected to serve better: {why}"


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"
