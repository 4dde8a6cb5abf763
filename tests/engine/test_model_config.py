"""config.json in both layouts of transformers, and refusal by name of what is not computed."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.registry import model_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def parse(**overrides: Any) -> ModelConfig:
    return model_config({**BASE, **overrides})


def test_defaults() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.num_groups) == (4, 16, 1)
    assert (config.rope.rope_type, config.rope.theta, config.rope.rotary_dim) == ("default", 10000.0, 16)
    assert config.eos_token_ids == frozenset()
    assert config.windows == (None,) * 4
    assert parse(model_type="qwen3").head_dim == 128


def test_both_layouts_say_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    old = parse(rope_scaling={"rope_type": "llama3", **scaling}, rope_theta=5e5, torch_dtype="bfloat16")
    older = parse(rope_scaling={"type": "llama3", **scaling}, rope_theta=500000, torch_dtype="torch.bfloat16")
    assert new == old == older
    assert (new.rope.theta, new.rope.original_max_context, new.dtype) == (5e5, 512, "bfloat16")


def test_yarn_without_an_original_context_takes_the_models() -> None:
    assert parse(rope_scaling={"type": "yarn", "factor": 2.0}).rope.original_max_context == 2048


def test_partial_rotation() -> None:
    assert parse(partial_rotary_factor=0.5).rope.rotary_dim == 8
    assert parse(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}).rope.rotary_dim == 4


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 9}, (9,) * 4),
        ({"model_type": "llama", "sliding_window": None}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, (9,) * 4),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
def test_sliding_windows(overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse(**overrides).windows == windows


def test_biases() -> None:
    assert (parse(model_type="qwen2").qkv_bias, parse(model_type="qwen2").output_bias) == (True, False)
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    assert not parse(model_type="mistral", attention_bias=False).qkv_bias


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
KV_ALONE = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV_SCHEME}


def test_plain_weights_with_scales_for_kv_are_plain_weights() -> None:
    assert parse(quantization_config=KV_ALONE) == parse()


@pytest.mark.parametrize("value", [7, [7], [7, 7]])
def test_eos_is_one_or_several(value: object) -> None:
    assert parse(eos_token_id=value).eos_token_ids == {7}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": "gemma9_text"}, "model_type 'gemma9_text' is not supported"),
        ({"model_type": "mamba2"}, "model_type 'mamba2' is not supported: its layers have a recurrent state"),
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported: scores have a bias that grows with distance"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias: not read for model_type 'mistral'"),
        ({"sliding_window": 9}, "sliding_window: not read for model_type 'llama'"),
        ({"num_local_experts": 8}, "num_local_experts: not read for model_type 'llama'"),
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": 3.0}}, "rope_scaling.attn_factor: not read"),
        ({"hidden_act": "gelu_10"}, "hidden_act 'gelu_10' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": {**KV_ALONE, "config_groups": {"group_0": {}}}}, "quantization_config"),
        ({"quantization_config": {**KV_ALONE, "kv_cache_scheme": {**KV_SCHEME, "type": "int"}}}, "quantization_config"),
        ({"quantization_config": {**KV_ALONE, "kv_cache_scheme": {**KV_SCHEME, "strategy": "channel"}}}, "quantization_config"),
        ({"quantization_config": {**KV_ALONE, "kv_cache_scheme": None}}, "quantization_config"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "of type 'longrope' lack 'long_factor'"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope_type 'proportional' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "of type 'linear' lack 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta is 'big', not a number"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 4}, "layer_types: 'chunked_attention' is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types: 1 entries for"),
        ({"num_attention_heads": 0}, "no 'num_attention_heads', or it is 0"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"vocab_size": "many"}, "vocab_size is 'many', not a count"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, not a number"),
    ],
)
def test_what_is_not_supported_is_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(**overrides)
