"""Sizing: the pool gets what flags or free memory allow, and what does not fit is refused with the numbers."""

from __future__ import annotations

import pytest
import torch

from pdmesh.commands import plan
from pdmesh.engine.config import EngineConfig, default_kv_share
from pdmesh.engine.kv_cache.pool import KVShape
from pdmesh.engine.memory import MIB, DoesNotFit, check_weights_fit, effective_max_context, free_memory, kv_shape
from pdmesh.engine.models.registry import model_config

MODEL = model_config(
    {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
)
BLOCK = 4 * 2 * 16 * 2 * 64 * 4  # layers, keys and values, slots, heads, head_dim, bytes
SEQUENCE = 1024 // 16


def blocks(free: int = 2**40, **settings: object) -> int:
    return kv_shape(EngineConfig(model="m", **settings), MODEL, torch.float32, free).num_blocks  # type: ignore[arg-type]


def test_the_pool_is_as_asked() -> None:
    assert blocks(num_blocks=7) == 7
    assert blocks(kv_memory_mb=200) == 200 * MIB // BLOCK


def test_the_pool_is_a_share_of_what_is_free() -> None:
    assert blocks(free=300 * SEQUENCE * BLOCK // 100, kv_memory_share=0.5) == 150 * SEQUENCE // 100


@pytest.mark.parametrize(("device", "percent"), [("cpu", 30), ("cuda", 85)])
def test_the_share_is_the_devices_unless_given(device: str, percent: int) -> None:
    """As the planner counts."""
    assert blocks(free=4 * SEQUENCE * BLOCK, device=device) == 4 * SEQUENCE * percent // 100
    assert (default_kv_share("cpu"), default_kv_share("cuda")) == (plan._CPU_KV_SHARE, plan._GPU_KV_SHARE)


def test_the_pool_is_no_more_than_all_sequences_can_use() -> None:
    assert blocks(max_num_seqs=3) == 3 * SEQUENCE
    assert blocks(max_num_seqs=3, max_context=100) == 3 * 7


@pytest.mark.parametrize("settings", [{"kv_memory_mb": 1}, {"kv_memory_share": 0.001}])
def test_a_pool_too_small_for_one_sequence_is_refused_with_the_numbers(settings: dict[str, object]) -> None:
    with pytest.raises(DoesNotFit, match=r"one sequence of 1024 tokens needs 64 \(4 MiB\).*free.*lower max_context"):
        blocks(free=1000 * MIB, **settings)


def test_a_pool_larger_than_memory_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="has 100 MiB free; lower num_blocks"):
        blocks(free=100 * MIB, num_blocks=100_000)


def test_what_steps_need_is_left_free() -> None:
    config = EngineConfig(model="m", kv_memory_share=0.5)
    assert (
        kv_shape(config, MODEL, torch.float32, 400 * SEQUENCE * BLOCK // 100, SEQUENCE * BLOCK).num_blocks
        == 150 * SEQUENCE // 100
    )
    with pytest.raises(DoesNotFit, match="has 60 MiB free beside 40 MiB for steps; lower num_blocks"):
        kv_shape(EngineConfig(model="m", num_blocks=1000), MODEL, torch.float32, 100 * MIB, 40 * MIB)


def test_a_drafts_pool_lies_beside_every_block() -> None:
    free = 400 * SEQUENCE * BLOCK // 100
    config = EngineConfig(model="m", kv_memory_share=0.5)
    assert kv_shape(config, MODEL, torch.float32, free, 0, BLOCK // 3).num_blocks == 150 * SEQUENCE // 100
    config = EngineConfig(model="m", num_blocks=4 * SEQUENCE)
    assert kv_shape(config, MODEL, torch.float32, free).num_blocks == 4 * SEQUENCE
    with pytest.raises(DoesNotFit, match=r"with the draft model's needs 21 MiB \(256 blocks\), cpu has 16 MiB free"):
        kv_shape(config, MODEL, torch.float32, free, 0, BLOCK // 3)


def test_an_int8_token_carries_its_scale() -> None:
    def shape(dtype: torch.dtype) -> KVShape:
        return kv_shape(EngineConfig(model="m", num_blocks=5), MODEL, dtype, 2**40)

    assert shape(torch.bfloat16).bytes_per_block == BLOCK // 2
    assert shape(torch.int8).bytes_per_block == BLOCK // 4 + 4 * 2 * 16 * 2 * 4  # a float32 for each token and head
    assert shape(torch.int8).tensor_shape == (4, 2, 5, 16, 2, 64 + 4)


def test_weights_larger_than_memory_are_refused() -> None:
    check_weights_fit(10, 10, "cpu")
    with pytest.raises(DoesNotFit, match="weights need 3,000 MiB, cpu has 2,000 MiB free"):
        check_weights_fit(3000 * MIB, 2000 * MIB, "cpu")


def test_max_context_is_the_models_or_less() -> None:
    assert effective_max_context(EngineConfig(model="m"), MODEL) == 1024
    assert effective_max_context(EngineConfig(model="m", max_context=10), MODEL) == 10
    with pytest.raises(ValueError, match="max_context: 1025 is more than the model's 1024"):
        effective_max_context(EngineConfig(model="m", max_context=1025), MODEL)


def test_free_memory_is_less_than_the_machines() -> None:
    assert MIB < free_memory("cpu") < 2**50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_torch_keeps_of_a_gpu_is_free() -> None:
    before = free_memory("cuda")
    kept = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    assert free_memory("cuda") <= before - 255 * MIB
    del kept
    assert free_memory("cuda") > before - 64 * MIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, "model: empty"),
        ({"device": "tpu"}, "device: 'tpu' is not known; give one of cpu, cuda"),
        ({"dtype": "int8"}, "dtype: 'int8'"),
        ({"backend": "cuda"}, "backend: 'cuda' is not known; give one of auto, native, triton, torch"),
        ({"quantization": "int2"}, "quantization: 'int2' is not known; give one of auto, none, int8, int4"),
        ({"quantization_group": 16}, "quantization_group: 16 is not known; give 32, 64 or 128"),
        ({"kv_dtype": "float16"}, "kv_dtype: 'float16' is not known; give one of auto, float32, bfloat16, int8, fp8"),
        ({"block_size": 0}, "block_size: 0 is less than 1"),
        ({"num_threads": -1}, "num_threads: -1 is less than 0"),
        ({"shared_cores": -1}, "shared_cores: -1 is less than 0"),
        ({"num_threads": 100_000}, "num_threads: 100000 is more than 1024"),
        ({"kv_memory_share": 1.5}, "kv_memory_share: 1.5 is not in"),
        ({"kv_memory_share": -0.1}, "kv_memory_share: -0.1 is not in"),
        ({"num_blocks": 3, "kv_memory_mb": 3}, "give one of them"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"model": "m", **settings}).validate()  # type: ignore[arg-type]
