"""Every kernel of the other parts, compiled by all cores: one after the other they would take longer than the whole run."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.context import Context
from benchmarks.gpu.parts import attention, decode, greedy, mesh, prefill
from benchmarks.gpu.shapes import BLOCK_SIZE
from benchmarks.harness import Figure
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.blocks import TritonSums
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeGraphs, DecodeSizes, fewest_rows
from pdmesh.engine.kernels.triton.model import warm, warm_moves
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.kernels.triton.step import TritonStep
from pdmesh.engine.kv_cache.block_moves import NUM_SUMS, Blocks
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.sampling.sampler import SampledToken, SampleRow
from tests.gpu.checks import attention_checks, checks, linear_checks
from tests.support.random_models import make_decoder
from tests.support.random_weights import engine_config

# Triton's kernels compiled ahead, by as many processes as there are cores, into the cache on the disk where every later launch
# looks first.
#
#     this process   launches on tensors without memory ──► the hook that Triton asks before it compiles: the launch is kept
#     its children   the same launches, one at a time, as `warmup`: compiled, assembled, and the C code that starts them built
#
# Nothing here asks for the GPU: the driver only says which one is meant, so that children may be forked. They go through Triton's
# own way from arguments to a kernel, so what they leave is what a launch with such arguments finds. The driver stays, so this
# wants a process of its own, in which kernels are not interpreted.


HOPPER = 90
SLOWEST = ("limits_kernel", "scores_kernel", "split_kernel", "product_kernel", "walk_kernel", "merge_kernel")
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


# What all later parts launch, on tensors of the same shapes that have no memory and no numbers (torch's device `meta`).
#
# Triton makes a kernel of a launch's types, its constants, and whether numbers are 1 and numbers and addresses multiples of 16.
# All of these follow from shapes, which here are the real ones but for the number of layers; so models of 8 G weights take a
# second. What a part has compiled nonetheless it says itself (part.py).


META = "meta"
TABLE_WIDTHS = (32, 33)
"""Of block tables: whether rows of one are multiples of 16 numbers long is all that a kernel may see of it."""

Scene = tuple[str, Callable[[], object]]


def scenes(context: Context) -> Iterator[Scene]:
    """By name. `context`: of the device whose kernels are wanted; what is launched is all on `meta`."""
    there = replace(context, device=META)
    for title, values, weights, kv_dtype in _models(context):
        yield title, partial(_model, context, values, weights, kv_dtype)
    for name, check in chain(checks(there), attention_checks(there), linear_checks(there)):
        yield name, partial(check, there)
    for model in context.scale.heads:
        yield f"attention of {model}", partial(attention.rehearse, there, model)
    yield "draws", partial(_draws, context)
    yield "copies of blocks", partial(_copies, context)


def _models(context: Context) -> Iterator[tuple[str, Mapping[str, object], str, str]]:
    """Name, shape, weights and KV of every model that some part has an engine of: hand-off and peers have the plain ones."""
    models = context.scale.models
    pairs = dict.fromkeys((*greedy.CASES, *decode.FORMATS, *((model, weights) for model, weights, _ in prefill.CASES)))
    for model, weights in pairs:
        yield f"{model}, weights {weights}", models[model], weights, "auto"
    yield "8B, weights and KV in fp8", models["8B"], "fp8", "fp8"
    served = mesh.SHAPE if context.device == "cuda" else mesh.TINY_SHAPE
    yield "the mesh's", {**models["1B"], "head_dim": None, "tie_word_embeddings": False, **served}, "none", "auto"


@torch.inference_mode()
def _model(context: Context, values: Mapping[str, object], weights: str, kv_dtype: str) -> None:
    shape = model_config({**values, "num_hidden_layers": 2})
    config = engine_config("cpu", max_num_seqs=max(context.scale.batches), max_context=max(TABLE_WIDTHS) * BLOCK_SIZE)
    decoder = make_decoder(shape, weights, config, context.dtype, META)
    is_fp8 = kv_dtype == "fp8"
    scales = torch.ones((2, 2), device=META) if is_fp8 else None
    step = TritonStep(decoder, TritonAttention(shape, META, kv_scales=scales))
    heads = (BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    kv = torch.empty((2, 2, 64, *heads), device=META, dtype=torch.float8_e4m3fn if is_fp8 else context.dtype)
    warm(step, kv)
    for width in TABLE_WIDTHS:
        sizes = DecodeSizes(config.max_num_seqs, width * BLOCK_SIZE, BLOCK_SIZE, fewest_rows(decoder.device))
        DecodeGraphs(step, kv, sizes, None).prepare()


class _Drawer(DeviceSampler):
    """Draws what nobody reads."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        self.start(logits, rows)
        return []


def _draws(context: Context) -> None:
    """The mesh's, too: a kernel knows the vocabulary."""
    served = mesh.SHAPE if context.device == "cuda" else mesh.TINY_SHAPE
    for vocab_size in {context.scale.config("8B").vocab_size, served["vocab_size"]}:
        _Drawer().prepare(vocab_size, torch.device(META))


@torch.inference_mode()
def _copies(context: Context) -> None:
    """Of the hand-off and of the mesh: gathered, scattered, summed, copied from pool to pool."""
    for shape in {(each.num_kv_heads, each.head_dim) for each in map(context.scale.config, context.scale.models)}:
        kv = torch.empty((2, 2, 64, BLOCK_SIZE, *shape), device=META, dtype=context.dtype)
        warm_moves(kv)
        words = kv.flatten(3).view(torch.int64)
        ids, sums = torch.zeros(4, device=META, dtype=torch.int32), torch.zeros(NUM_SUMS, device=META, dtype=torch.int64)
        blocks = Blocks(words, range(2), ids)
        TritonSums().sum(blocks, sums)
        TritonSums().copy(blocks, blocks, sums)


def run(context: Context) -> None:
    began = time.monotonic()
    launches = _launches(context)
    context.note(f"{len(launches)} kernels were asked for in {time.monotonic() - began:.1f} s")
    results = []
    for result in compiled(launches, context.deadline.left_s, builds_launchers=context.device == "cuda"):
        results.append(result)
        if result.error:
            context.note(f"{result.name} was not compiled ahead: {result.error}")
    new = [result for result in results if result.is_new]
    slowest = max(results, key=lambda result: result.seconds, default=None)
    if slowest is not None:
        context.note(f"the slowest was {slowest.name}: {slowest.seconds:.1f} s of {sum(each.seconds for each in results):.1f} s")
    if len(results) < len(launches):
        context.note(f"left out, as the part's time was used up: {len(launches) - len(results)} kernels")
    context.note(f"compiled: {_words(Counter(result.name for result in new))}; {len(results) - len(new)} were there")
    context.add(Figure("kernels compiled ahead", float(len(results)), "kernels", "higher", limit=float(len(launches))))
    context.add(Figure("time to compile them", time.monotonic() - began, "s", "lower"))


def _launches(context: Context) -> list[Launch]:
    """A scene that breaks is told of and left to its part."""
    with recorded(context.capability) as launches:
        for name, scene in scenes(context):
            try:
                scene()
            except Exception as error:  # noqa: BLE001 - its part will say so
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                context.note(f"not all of it compiled ahead: {name}: {why}")
    return launches.ordered()


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"
