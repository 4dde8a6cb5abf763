"""What all later parts launch, on tensors of the same shapes that have no memory and no numbers (torch's device `meta`).

Triton makes a kernel of a launch's types, its constants, and whether numbers are 1 and numbers and addresses multiples of 16. All
of these follow from shapes, which here are the real ones but for the number of layers; so models of 8 G weights take a second.
What a part has compiled nonetheless it says itself (fresh.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.drawn import engine_config
from benchmarks.gpu.paged import BLOCK_SIZE
from benchmarks.gpu.parts import attention, decode, greedy, mesh, prefill
from benchmarks.gpu.weights import make_decoder
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.blocks import TritonSums
from pdmesh.engine.kernels.triton.cuda_graphs import DecodeGraphs, DecodeSizes
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.kernels.triton.step import TritonStep
from pdmesh.engine.kernels.triton.warmup import warm, warm_moves
from pdmesh.engine.kv_cache.ipc_pool import NUM_SUMS, Blocks
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.sampling.sampler import SampledToken, SampleRow
from tests.gpu.checks import checks
from tests.gpu.checks_attention import attention_checks
from tests.gpu.checks_linear import linear_checks

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
    shape = ModelConfig.from_dict({**values, "num_hidden_layers": 2})
    config = engine_config("cpu", max_num_seqs=max(context.scale.batches), max_context=max(TABLE_WIDTHS) * BLOCK_SIZE)
    decoder = make_decoder(shape, weights, config, context.dtype, META)
    is_fp8 = kv_dtype == "fp8"
    scales = torch.ones((2, 2), device=META) if is_fp8 else None
    step = TritonStep(decoder, TritonAttention(shape, META, kv_scales=scales))
    heads = (BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    kv = torch.empty((2, 2, 64, *heads), device=META, dtype=torch.float8_e4m3fn if is_fp8 else context.dtype)
    warm(step, kv)
    for width in TABLE_WIDTHS:
        DecodeGraphs(step, kv, DecodeSizes(config.max_num_seqs, width * BLOCK_SIZE, BLOCK_SIZE), None).prepare()


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
