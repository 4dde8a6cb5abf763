"""How many kernels a model compiles: `python -m tests.engine.kernels.triton.sweep WEIGHTS`, when it is prepared, and after that
for steps of all sizes. One line of JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.blocks import TritonBlocks
from pdmesh.engine.kernels.triton.metadata import Capacity, StepMetadata
from pdmesh.engine.kernels.triton.model import padded, warm, warm_moves
from pdmesh.engine.kernels.triton.step import TritonStep
from pdmesh.engine.kv_cache.block_moves import Move
from pdmesh.engine.loader.quantize import quantize_int8
from pdmesh.engine.lora.triton_maps import TritonAdapters
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.runner.batch import StepBatch
from tests.engine.kernels.triton.launches import mixture
from tests.engine.kernels.triton.paged import Sequences, Shape
from tests.engine.kernels.triton.recording import Recorder, recording
from tests.support.random_models import make_decoder
from tests.support.random_weights import engine_config

HEADS = Shape(num_heads=6, num_kv_heads=2, head_dim=64)  # a group of three: rows of a step are no multiple of 16
FORMS = {"none": None, "int8": quantize_int8}
LATENT = {
    "kv_lora_rank": 256, "q_lora_rank": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "scale_emb": 2.0,
    "scale_depth": 1.4, "dim_model_base": 256,
}  # fmt: skip
TOKENS = (1, 4, 8, 12, 16, 17, 20, 31, 33, 36, 48, 64, 68, 96, 100, 128, 132, 200, 512)


def steps() -> Iterator[StepBatch]:
    """Prompts, chunks, decode steps and mixes of them; tables of 1 block, of 16 and of odd numbers; tails."""
    for num_tokens in TOKENS:
        for before in (0, 1, 40, 256):
            yield _batch([(num_tokens + before, num_tokens)])
        yield _batch([(40 + index, 1) for index in range(num_tokens)])
    for tail in (1, 2, 16):
        yield _batch([(300, 3), (41, 1), (90, 20), (1400, 1380)], tail)
    yield _batch([(1500, 1), (700, 16), (513, 512)])


def _batch(lengths: list[tuple[int, int]], tail: int = 0) -> StepBatch:
    return Sequences(Shape(1, 1, 1), lengths, tail=tail).batch


def make_step(weights: str) -> TritonStep:
    """A layer whose maps have several shares of their inputs; `experts` and a format: with a mixture of them;
    `adapters`: with places for adapters; `latents`: with latent attention."""
    sizes = {"hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 1, "vocab_size": 2048, "dtype": "bfloat16"}
    heads = {"num_attention_heads": HEADS.num_heads, "num_key_value_heads": HEADS.num_kv_heads, "head_dim": HEADS.head_dim}
    kind = {"model_type": "minicpm3", **LATENT} if weights == "latents" else {"model_type": "llama"}
    shape = model_config({**kind, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **sizes, **heads})
    config = engine_config("cpu", max_num_seqs=8, max_context=4096)
    decoder = make_decoder(shape, weights if weights in ("int8", "int4") else "none", config, torch.bfloat16)
    if weights.startswith("experts"):
        mixed = mixture(FORMS[weights.removeprefix("experts ")], "silu", 512, 384, shared=64)
        decoder.layers[:] = [replace(layer, mlp=mixed) for layer in decoder.layers]
    adapters = TritonAdapters(decoder, 3, 16).rows if weights == "adapters" else None
    return TritonStep(decoder, TritonAttention(shape, "cpu"), adapters)


def main(weights: str) -> None:
    step = make_step(weights)
    config = step.decoder.config
    kv = torch.zeros(1, 2, 1000, 16, config.pool_heads, config.pool_dim, dtype=torch.bfloat16)
    with recording() as recorder, torch.inference_mode():
        warm(step, kv)
        warm_moves(kv)
        warmed = names(recorder)
        for batch in steps():
            step.run(StepMetadata.of(batch, "cpu", padded(Capacity.of(batch))), kv, adapted=step.kinds[-1])
        for num_tokens in (1, 7, 16, 33, 64):
            ids = torch.zeros(5, dtype=torch.int32)
            piece = torch.zeros(1, 2, num_tokens, *kv.shape[4:], dtype=kv.dtype)
            for first in (0, 1, 3, 15):
                TritonBlocks().gather(Move(kv, range(1), ids, piece, first))
                TritonBlocks().scatter(Move(kv, range(1), ids, piece, first))
    print(json.dumps({"warmed": warmed, "later": names(recorder) - warmed}))


def names(recorder: Recorder) -> Counter[str]:
    return Counter(variant.name for variant in recorder.variants.values())


if __name__ == "__main__":
    main(sys.argv[1])
