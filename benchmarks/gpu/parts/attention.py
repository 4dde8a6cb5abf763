"""One layer's attention: a query over a long context, its keys split over the chip and not; a prompt; torch and FlashInfer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.context import Context, turns_s
from benchmarks.gpu.shapes import BLOCK_SIZE, Sequence, attention_bytes, causal_operations
from benchmarks.harness import Figure
from pdmesh.engine.kernels.triton.attention import Workspace, paged_attention
from pdmesh.engine.kernels.triton.split_kv import SPLITS, Splits
from tests.gpu.errors import relative_error

UNSPLIT = Splits(SPLITS.min_keys, 1)
SHARE_GOAL, SPEEDUP_GOAL = 70.0, 8.0
EXPECTED_S, EXPECTED_SHORT_S = 4.0, 0.5
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
Attend = Callable[[], Tensor]
TOLERANCE = 2e-2  # of the norm of what is expected: roundings of bfloat16 on both sides


@torch.inference_mode()
def run(context: Context) -> None:
    for index, model in enumerate(context.scale.heads):
        if context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"attention of {model}"):
            _decode(context, model, context.scale.long_context, is_asked=index == 0)
    for length in context.scale.short_contexts:
        if context.has_time(EXPECTED_SHORT_S if context.device == "cuda" else 0.0, f"attention over {length} keys"):
            _decode(context, next(iter(context.scale.heads)), length)
    for model in context.scale.heads:
        if context.has_time(EXPECTED_S if context.device == "cuda" else 0.0, f"prefill attention of {model}"):
            _prefill(context, model)
    if not HAS_FLASHINFER:
        context.note("FlashInfer is not installed here: nothing was measured of it")


@torch.inference_mode()
def rehearse(context: Context, model: str) -> None:
    """What is launched of ours; see compile.py."""
    scale = context.scale
    for queries, length in ((1, scale.long_context), (scale.prefill, scale.prefill)):
        sequence = Sequence.random(scale.heads[model], length, queries, context.device, context.dtype)
        for splits in (SPLITS, UNSPLIT):
            _ours(sequence, splits)()


def _decode(context: Context, model: str, length: int, *, is_asked: bool = False) -> None:
    heads = context.scale.heads[model]
    sequence = Sequence.random(heads, length, 1, context.device, context.dtype)
    name = f"attention {model}, {length} keys"
    exact = _torch_attention(sequence, is_causal=False)
    works = {
        "split": _ours(sequence, SPLITS),
        "unsplit": _ours(sequence, UNSPLIT),
        "torch SDPA": exact,
        **_flashinfer_if_any(context, partial(_flash_decode, sequence)),
    }
    expected = exact()
    seconds = _checked_s(context, name, works, expected)
    num_bytes = attention_bytes(heads, length, context.dtype.itemsize, SPLITS)
    least_s = num_bytes / context.machine.bytes_per_s
    context.note(f"{name}: {num_bytes / 1e6:.4g} MB")
    for kind, value in seconds.items():
        context.add(Figure(f"{name}: {kind}", value * 1e6, "us", "lower", limit=least_s * 1e6, peer=_peer(kind)))
    share_goal, speedup_goal = (SHARE_GOAL, SPEEDUP_GOAL) if is_asked else (None, None)
    share = 100 * least_s / seconds["split"]
    context.add(Figure(f"{name}: split, share of bandwidth", share, "%", "higher", goal=share_goal, limit=100.0))
    speedup = seconds["unsplit"] / seconds["split"]
    most = seconds["unsplit"] / least_s
    context.add(Figure(f"{name}: split over unsplit", speedup, "x", "higher", goal=speedup_goal, limit=most, peer="unsplit"))


def _prefill(context: Context, model: str) -> None:
    heads, length = context.scale.heads[model], context.scale.prefill
    sequence = Sequence.random(heads, length, length, context.device, context.dtype)
    name = f"prefill attention {model}, {length} tokens"
    exact = _torch_attention(sequence, is_causal=True)
    works = {
        "pdmesh": _ours(sequence, SPLITS),
        "torch SDPA": exact,
        **_flashinfer_if_any(context, partial(_flash_prefill, sequence)),
    }
    expected = exact()
    operations, peak = causal_operations(heads, length), context.machine.operations_per_s
    context.note(f"{name}: {operations / 1e12:.4g} * 10^12 operations")
    for kind, value in _checked_s(context, name, works, expected).items():
        rate, unit = operations / value / 1e12, "10^12 operations/s"
        context.add(Figure(f"{name}: {kind}", rate, unit, "higher", limit=peak / 1e12, peer=_peer(kind)))


def _peer(kind: str) -> str | None:
    return None if kind in ("split", "unsplit", "pdmesh") else kind


def _checked_s(context: Context, name: str, works: dict[str, Attend], expected: Tensor) -> dict[str, float]:
    """Seconds of each on the device, in turn; what is not equal is told."""
    for kind, work in works.items():
        error = relative_error(work(), expected)
        if not error <= TOLERANCE:
            context.fail(f"{name}, {kind}: off by {error:.3g} of torch's attention")
    return turns_s(works, context.device)


def _ours(sequence: Sequence, splits: Splits) -> Attend:
    meta, heads, out = sequence.meta(), sequence.heads, torch.empty_like(sequence.query)
    workspace = Workspace.of(meta, heads.num_heads, heads.head_dim, splits)
    return lambda: paged_attention(sequence.query, sequence.kv, meta, out=out, workspace=workspace, splits=splits)


def _torch_attention(sequence: Sequence, *, is_causal: bool) -> Attend:
    """Over keys in one piece: it has no paged ones."""
    query, key, value = sequence.dense()
    attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=is_causal, enable_gqa=True)
    return lambda: attend().transpose(1, 2)[0]


def _flashinfer_if_any(context: Context, make: Callable[[], Attend]) -> dict[str, Attend]:
    """Nothing where it is not installed, or cannot compile its kernels here, which is noted."""
    if not HAS_FLASHINFER:
        return {}
    try:
        return {"FlashInfer": make()}
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:200]
        context.note(f"FlashInfer: nothing was measured of it: {type(error).__name__}: {why}")
        return {}


def _flash_prefill(sequence: Sequence) -> Attend:
    """Its prefill of one sequence over keys in one piece, as torch's has them."""
    flashinfer, (_, key, value) = importlib.import_module("flashinfer"), sequence.dense()
    keys, values = (x[0].transpose(0, 1).contiguous() for x in (key, value))
    attend: Attend = lambda: flashinfer.single_prefill_with_kv_cache(sequence.query, keys, values, causal=True)  # noqa: E731
    attend()
    return attend


def _flash_decode(sequence: Sequence) -> Attend:
    """Its batch decode over the same pages."""
    flashinfer, heads = importlib.import_module("flashinfer"), sequence.heads
    device = sequence.query.device
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 27, dtype=torch.uint8, device=device), "NHD")
    indptr = torch.tensor([0, len(sequence.table)], dtype=torch.int32, device=device)
    pages = torch.tensor(sequence.table, dtype=torch.int32, device=device)
    last = torch.tensor([(sequence.context - 1) % BLOCK_SIZE + 1], dtype=torch.int32, device=device)
    dtype, sizes = sequence.query.dtype, (heads.num_heads, heads.num_kv_heads, heads.head_dim, BLOCK_SIZE)
    wrapper.plan(indptr, pages, last, *sizes, q_data_type=dtype, kv_data_type=dtype)
    attend: Attend = lambda: wrapper.run(sequence.query, (sequence.kv[0], sequence.kv[1]))  # noqa: E731
    attend()
    return attend
