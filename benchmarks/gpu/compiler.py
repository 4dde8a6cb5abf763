"""Triton's kernels compiled ahead, by as many processes as there are cores, into the cache on the disk where every later launch
looks first.

    this process   launches on tensors without memory ──► the hook that Triton asks before it compiles: the launch is kept
    its children   the same launches, one at a time, as `warmup`: compiled, assembled, and the C code that starts them built

Nothing here asks for the GPU: the driver only says which one is meant, so that children may be forked. They go through Triton's
own way from arguments to a kernel, so what they leave is what a launch with such arguments finds. The driver stays, so this
wants a process of its own, in which kernels are not interpreted.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = 90
SLOWEST = ("limits_kernel", "scores_kernel", "split_kernel", "vector_kernel", "walk_kernel", "merge_kernel", "tile_kernel")
"""Compiled first, so that none of them is begun last."""


@dataclass(frozen=True)
class Launch:
    """A kernel with what it was given."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True)
class Compiled:
    """What became of a launch. `error` empty: it is in the cache; `is_new` unless it was there before."""

    name: str
    seconds: float
    is_new: bool
    error: str


@dataclass
class Launches:
    """Of different kernels, or of one with arguments that make another one of it."""

    found: dict[str, Launch] = field(default_factory=dict)

    def ordered(self) -> list[Launch]:
        places = {name: place for place, name in enumerate(SLOWEST)}
        return sorted(self.found.values(), key=lambda launch: places.get(launch.name, len(places)))


@contextmanager
def recorded(capability: int = HOPPER) -> Iterator[Launches]:
    """Launches within it are kept, and do nothing."""
    launches, run = Launches(), JITFunction.run
    given: list[Launch] = []

    def keep(*, key: str, fn: Any, **_: Any) -> bool:
        launches.found.setdefault(f"{fn.name} {key}", given[-1])
        return True  # Triton goes no further

    def run_and_keep(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        given.append(Launch(self, arguments, dict(options)))
        try:
            return run(self, *arguments, grid=grid, warmup=warmup, **options)
        finally:
            given.pop()

    driver.set_active(_Driver(capability))
    knobs.runtime.jit_cache_hook, JITFunction.run = keep, run_and_keep
    try:
        yield launches
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run = None, run


def compiled(launches: list[Launch], seconds: float, *, builds_launchers: bool) -> Iterator[Compiled]:
    """Each as it is done, until the time is over. `builds_launchers`: also the C code around each kernel, for which there must be
    a driver on this machine."""
    _Work.launches, _Work.builds_launchers = launches, builds_launchers
    end = time.monotonic() + seconds
    with warnings.catch_warnings():  # about threads, which a fork does not take along: none of them holds what a compiler needs
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = multiprocessing.get_context("fork").Pool(max(1, min(len(launches), len(os.sched_getaffinity(0)))))
    with pool:
        results = pool.imap_unordered(_compile, range(len(launches)))
        for _ in launches:
            try:
                yield results.next(max(0.1, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                return


class _Work:
    """What children inherit."""

    launches: list[Launch]
    builds_launchers: bool


def _compile(index: int) -> Compiled:
    launch, began, misses = _Work.launches[index], time.monotonic(), list[bool]()
    knobs.compilation.listener = lambda *, cache_hit, **_: misses.append(not cache_hit)
    error = ""
    try:
        kernel = launch.kernel.run(*launch.arguments, grid=(1,), warmup=True, **launch.options)
        if _Work.builds_launchers:
            _build_launcher(kernel)
    except Exception as raised:  # noqa: BLE001 - whatever the compiler has to say, the others are compiled
        error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
    return Compiled(launch.name, time.monotonic() - began, any(misses), error)


def _build_launcher(kernel: Any) -> None:
    """Built and loaded, not called. The first child to come also builds what loads kernels."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    CudaUtils()
    CudaLauncher(kernel.src, kernel.metadata)


class _Driver:
    """What the compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace()

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
