"""Active and total weights, KV and steps of three published mixtures of experts, against arithmetic by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.memory import kv_shape
from pdmesh.engine.models.registry import model_config
from pdmesh.planner.meshes import by_roofline
from pdmesh.planner.shapes import ShapeError, decoder_of, read_decoder
from pdmesh.planner.traffic import Subject
from pdmesh.planning.devices import DEVICES, Device
from pdmesh.planning.latency_model import Hardware, ModelShape, distinct_experts, prior_of
from pdmesh.planning.roofline import Roofline
from tests.pdmesh.tiny_gguf import write_tiny_gguf

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
"""As their authors publish them, DeepSeek's without the format of its weights; of Llama 3 the shapes."""


@pytest.mark.parametrize(
    ("config", "shared", "expert", "published", "published_active"),
    [
        # 32 layers of attention (4096 · 128 · 2 · 40) and router (4096 · 8); an expert is 3 · 4096 · 14336 in each.
        (MIXTRAL_8X7B, 32 * (41_943_040 + 32_768), 32 * 176_160_768, 46.7e9, 12.9e9),
        # 61 of attention: 1536 · (7168 + 128 · 192) + 7168 · 576 + 512 · 128 · 256 + 7168 · 128 · 128; 3 dense MLPs of
        # 3 · 7168 · 18432; 58 with a router of 7168 · 256, a shared expert and 256 others, each 3 · 7168 · 2048.
        (DEEPSEEK_V3, 61 * 187_105_280 + 3 * 396_361_728 + 58 * (1_835_008 + 44_040_192), 58 * 44_040_192, 671e9, 37.5e9),
        # 48 of attention (2048 · 128 · 2 · 36) and router (2048 · 128); an expert is 3 · 2048 · 768 in each.
        (QWEN3_30B_A3B, 48 * (18_874_368 + 262_144), 48 * 4_718_592, 30.5e9, 3.3e9),
    ],
    ids=["mixtral", "deepseek_v3", "qwen3_moe"],
)
def test_active_and_total_weights(
    config: dict[str, object], shared: int, expert: int, published: float, published_active: float
) -> None:
    model = model_config(config)
    count = model.weights
    assert (count.shared, count.expert) == (shared, expert)
    table = model.vocab_size * model.hidden_size
    assert count.total == shared + count.num_experts * expert
    assert count.total + 2 * table == pytest.approx(published, rel=0.002)
    assert count.active == shared + count.top_k * expert
    assert count.active + 2 * table == pytest.approx(published_active, rel=0.02)  # published with both tables
    decoder = decoder_of(config)
    assert (decoder.num_weights, decoder.num_parameters) == (count.active, count.total + 2 * table)
    assert decoder.num_active_parameters == count.active + 2 * table
    assert decoder.num_weights_read(1) == pytest.approx(count.active)
    assert decoder.num_weights_read(10_000) == pytest.approx(count.total)


def test_a_plan_names_both_numbers() -> None:
    of = {"model": "m", "load": "l", "weights": "bfloat16", "device": DEVICES["h100-sxm"]}
    mixtral, dense = (Subject(**of, decoder=decoder_of(config)) for config in (MIXTRAL_8X7B, LLAMA_3_8B))  # type: ignore[arg-type]
    assert mixtral.title == "m (46.7 B parameters, 12.9 B active, bfloat16) on h100-sxm"
    assert dense.title == "m (8.0 B parameters, bfloat16) on h100-sxm"


def test_experts_that_a_step_reads() -> None:
    """Of 8, a token takes 2; two tokens leave one out with (3 / 4) ^ 2; none is read for no token, or of a model without."""
    assert distinct_experts(8, 2, 1) == 2
    assert distinct_experts(8, 2, 2) == 8 * (1 - 9 / 16) == 3.5
    assert distinct_experts(256, 8, 32) == pytest.approx(256 * (1 - (31 / 32) ** 32)) == pytest.approx(163.3, abs=0.1)
    assert distinct_experts(8, 2, 0) == distinct_experts(0, 0, 5) == 0


def test_the_latents_kv_is_what_the_pool_holds() -> None:
    """576 numbers a layer and token, 70,272 bytes in bfloat16; with heads it would be 61 · 2 · 128 · 128 and more."""
    decoder, model = decoder_of(DEEPSEEK_V3), model_config(DEEPSEEK_V3)
    assert decoder.kv_bytes_per_token("bfloat16") == 61 * 576 * 2 == 70_272
    assert decoder.kv_bytes_per_token("int8") == 61 * (576 + 2 * 4)
    pool = kv_shape(EngineConfig("m", num_blocks=4), model, torch.bfloat16, 2**40)
    assert pool.bytes_per_block == pool.block_size * decoder.kv_bytes_per_token("bfloat16")
    # Scores of a latent take 128 heads · (576 + 512) multiplications for each pair of tokens.
    assert decoder.attention_operations == model.attention_operations == 2 * 61 * 128 * (576 + 512)
    assert decoder_of(QWEN3_30B_A3B).kv_bytes_per_token("bfloat16") == 48 * 2 * 4 * 128 * 2


def test_memory_holds_every_expert() -> None:
    """94 GB of Mixtral do not fit an H100 of 80 GB; in int4 they do, and so do 61 GB of Qwen3-30B-A3B."""
    mixtral, qwen = decoder_of(MIXTRAL_8X7B), decoder_of(QWEN3_30B_A3B)
    assert Roofline(DEVICES["h100-sxm"], mixtral).held_bytes() == pytest.approx(93.4e9, rel=0.002)
    with pytest.raises(ValueError, match="weights of 93 GB leave no room for KV"):
        by_roofline(Roofline(DEVICES["h100-sxm"], mixtral), 64, 2048, 0.85, 4096)
    assert by_roofline(Roofline(DEVICES["h100-sxm"], mixtral, "int4"), 64, 2048, 0.85, 4096).kv_tokens > 100_000
    free = DEVICES["h100-sxm"].memory_bytes - 2**30 - 2 * qwen.num_parameters
    assert Roofline(DEVICES["h100-sxm"], qwen).kv_tokens(1.0) == int(free / (48 * 2 * 4 * 128 * 2))
    model = model_config(MIXTRAL_8X7B)
    held = model.weights.total + 2 * 32000 * 4096
    assert Numerics("torch", "bfloat16", 0, torch.bfloat16, torch.bfloat16).num_bytes(model, held) == 2 * held


TOY = Device("toy", {"bfloat16": 1e15}, 1e12, 1e12, 0.0, compute_share=1.0, memory_share=1.0)
"""Products take no time beside reading."""


def test_a_step_reads_the_experts_of_its_tokens() -> None:
    """Two bytes a weight at 10^12 bytes a second: Mixtral's 1.34 · 10^9 shared weights, its head, and experts of 5.64 · 10^9."""
    roofline = Roofline(TOY, decoder_of(MIXTRAL_8X7B))
    shared, expert, head = 1_343_225_856, 5_637_144_576, 131_072_000
    assert roofline.read_s == pytest.approx(2 * (shared + head + 2 * expert) / 1e12)
    parts = roofline.decode_parts(4, 1)
    assert parts["reading weights"] == pytest.approx(2 * (shared + head + 8 * (1 - 0.75**4) * expert) / 1e12)
    assert roofline.prefill_parts(1000)["reading weights"] == pytest.approx(2 * (shared + head + 8 * expert) / 1e12)


def test_the_linear_model_is_exact_at_half_a_batch_and_a_full_one_and_above_the_curve_below() -> None:
    roofline = Roofline(TOY, decoder_of(QWEN3_30B_A3B))
    model = roofline.latency(2048, 16)
    for rows in (8, 16):
        assert model.decode_s(rows, 0) == pytest.approx(sum(roofline.decode_parts(rows, 0).values()))
    for rows in range(1, 8):
        assert model.decode_s(rows, 0) > sum(roofline.decode_parts(rows, 0).values())
    parts = roofline.prefill_parts(2048)
    assert model.prefill_s(0, 2048, chunk=2048) == pytest.approx(sum(parts.values()))


def test_a_workers_prior_counts_active_products_and_read_experts() -> None:
    """One layer of 1000 shared weights and 8 experts of 100 in 2 bytes; 2 of the experts for each token."""
    shape = ModelShape(1, 1200, 50, 2100, 8, 16, expert_bytes=200, num_experts=8, top_k=2)
    fast = Hardware(operations_per_s=2e30, bytes_per_s=1.25)  # 1 byte a second is reached
    model = prior_of(fast, shape, chunk=64, batch=4)
    read = [200 * 8 * (1 - 0.75**num) for num in (2, 4)]
    assert model.fixed_s == pytest.approx(2100 + 2 * read[0] - read[1], abs=0.01)
    assert model.decode_s(4, 0) == pytest.approx(2100 + read[1], abs=0.01)
    assert model.prefill_s(0, 64, chunk=64) == pytest.approx(2100 + 1600, abs=0.01)
    slow = Hardware(operations_per_s=4.0, bytes_per_s=1e30)  # 2 operations a second
    assert prior_of(slow, shape).per_prefill_token_s == pytest.approx(1200)
    dense = replace(shape, expert_bytes=0, num_experts=0, top_k=0)
    assert prior_of(fast, dense, chunk=64, batch=4).per_sequence_s == pytest.approx(0, abs=0.01)


def test_every_config_is_read_without_torch(tmp_path: Path) -> None:
    """`pdmesh plan` needs none, and `pdmesh up` refuses a model before anything is started."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    assert _weights_without_torch(path) == model_config(DEEPSEEK_V3).weights.active


def test_a_ggufs_header_is_read_without_torch(tmp_path: Path) -> None:
    """Nothing is converted for a plan."""
    path = write_tiny_gguf(tmp_path / "model.gguf")
    assert _weights_without_torch(path) == 2 * (32 * 8 * 2 * (4 + 2) + 3 * 32 * 64)
    assert (read_decoder(path).max_context, read_decoder(path, ["max_position_embeddings=64"]).max_context) == (256, 64)
    with pytest.raises(ShapeError, match=rf"^{path}: override: model_type.b: model_type holds no mapping"):
        read_decoder(path, ["model_type.b=1"])


def _weights_without_torch(path: Path) -> int:
    program = (
        "import sys; from pathlib import Path; from pdmesh.planner.shapes import read_decoder\n"
        f"print(read_decoder(Path({str(path)!r})).num_weights, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    count, has_torch = shown.stdout.split()
    assert has_torch == "False"
    return int(count)
