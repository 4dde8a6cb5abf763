"""Which layout of a machine's cores is expected to serve best, beside the one that was asked for, and why. Pure.

The rules are those that `make bench-router` shows (`mixes` and `lending` in benchmarks/results/router.json). The mesh of the
mixes is two workers with both roles, a core each and lent cores, where the router decides for each request whether one computes
for the other: in the median of the rounds no worse than the better of two aggregated deployments on any mix, and a prompt alone
takes 0.95 (1.11 on another machine) times as long as on both cores. Workers with a role each are a part of what that router may
choose; in mixes they were not measured. No other number of cores was.
"""

from __future__ import annotations

from pdmesh.launcher.plan import LocalMeshConfig, num_threads
from pdmesh.worker.engines.registry import DEFAULT_ENGINE

TWO_BOTH = "--prefill 0 --decode 0 --both 2"
ONE_BOTH = "--prefill 0 --decode 0 --both 1"
MEASURED = "the router chooses for each request which worker computes its prompt, and cores without work are lent"
ALONE_TIMES = 1.4
"""How much longer a prompt of 420 tokens alone takes on one of two cores, as measured (1.37 and 1.49)."""


def expectation(config: LocalMeshConfig, num_cores: int) -> str:
    """Return a line for the user; empty where nothing is known: other engines than ours, and GPUs, on which workers share a
    device."""
    if config.engine != DEFAULT_ENGINE or config.device != "cpu":
        return ""
    if num_cores < config.num_workers:
        why = f"{config.num_workers} workers share {_cores(num_cores)}, so "
        if num_cores == 1:
            return _better(ONE_BOTH, f"{why}nothing is computed side by side")
        return _better(TWO_BOTH, f"{why}some wait for the cores of others")
    if num_cores > 1 and (waits := _waiting_answers(config)):
        return waits
    if other_threads := _other_threads(config, num_cores):
        return other_threads
    if config.num_workers == 1:
        return "layout: one worker for prompts and answers, which is expected to serve best on one core"
    if not config.has_lending:
        each = num_threads(config, range(num_cores))
        alone = f"each worker computes on {_cores(each)} only, and a prompt alone takes up to {ALONE_TIMES:g} times as long"
        return _better("--lend-cores", alone) if config.can_lend else f"layout: no better one is known, but {alone}"
    if config.num_both == config.num_workers:
        return f"layout: expected to serve best, as in most mixes measured on two cores: {MEASURED}"
    return (
        "layout: expected to serve well: answers go on while prompts are computed, and cores without work are lent; in mixes on "
        f"two cores {TWO_BOTH} was measured, where the router has these and other choices"
    )


def _waiting_answers(config: LocalMeshConfig) -> str:
    """Return what is better where answers have to wait for prompts, or prompts have one worker only; else empty. Decode workers
    compute prompts where there is no prefill worker."""
    if config.num_workers == 1:
        return _better(TWO_BOTH, "with one worker for prompts and answers, answers wait while prompts are computed")
    if config.num_both in (0, config.num_workers):
        computes_none = not config.num_prefill and not config.num_both
        why = "no worker computes prompts for another, so the answers of each wait while it computes its own"
        return _better(TWO_BOTH, why) if computes_none else ""
    flags = "--both 0" if config.num_decode and config.num_prefill else TWO_BOTH
    return _better(flags, "the answers of a worker with both roles wait while it computes prompts")


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
