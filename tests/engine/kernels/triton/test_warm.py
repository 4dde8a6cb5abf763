"""Warming up launches every kind of step and leaves the pool as it was."""

from __future__ import annotations

import torch

from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.kernels.triton.model import padding_steps, warm, warm_moves
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.kernels.triton.step import TritonStep
from pdmesh.engine.models.registry import model_config
from tests.engine.kernels.triton.paged import DEVICE
from tests.support.random_models import make_decoder
from tests.support.random_weights import engine_config

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "dtype": "float16", **SIZES}


def test_warming_up_writes_nothing_to_the_pool() -> None:
    shape = model_config({**LLAMA, "num_key_value_heads": 1, "head_dim": 16})
    decoder = make_decoder(shape, "none", engine_config(DEVICE, max_num_seqs=4, max_context=64), torch.float16)
    kv = torch.randn(1, 2, 4, 16, 1, 16, device=DEVICE).half()
    before = kv.clone()
    warm(TritonStep(decoder, TritonAttention(shape, DEVICE, splits=Splits(64, 4))), kv, max_logits=6)
    warm_moves(kv)
    assert torch.equal(kv, before)


def test_rows_of_logits_stay_within_what_a_step_has() -> None:
    steps = list(padding_steps(Splits(), 6))
    assert [step.num_tokens for step in steps] == [4, 8, 16, 32, 64, 128, 132, 4, 8]
    assert max(step.num_logits for step in steps) == 8
