"""Checkpoints of transformers as GGUF files, the way llama.cpp's converter (convert_hf_to_gguf.py) writes them.

Names of tensors are those of the gguf package's own map from transformers' names; what the converter does to tensors and which
keys it writes stands here, learnt from its source. Nothing of pdmesh takes part, so a file is an independent witness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH as A
from safetensors import safe_open

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
Config = dict[str, Any]
Named = Iterator[tuple[str, np.ndarray]]
Change = Callable[[str, np.ndarray, Config], Named]
_Keys = Callable[[gguf.GGUFWriter, Config], None]


def export(
    folder: Path,
    path: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    old_latent: bool = False,
    kind: Any = F32,
) -> Path:
    """Write the model in `folder` to `path`, and return it. `extra`: keys behind the architecture's prefix that come last, None
    takes one away. `old_latent`: DeepSeek's latent is expanded by one map, as files before 2025 have it. `kind`: of matrices."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).to_dict()
    arch, change, keys = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    config["old_latent"] = old_latent
    _write_common(writer, config)
    keys(writer, config)
    for key, value in (extra or {}).items():
        _put(writer, f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value)
    table = gguf.get_tensor_name_map(arch, _first(config, "num_hidden_layers", "n_layer"))
    stored = ((name, tensor) for own, values in _tensors(folder) for name, tensor in change(own, values, config))
    for name, tensor in chain(_stacked(stored, config), _divisors(config)):
        _add(writer, _gguf_name(table, name), np.ascontiguousarray(tensor, dtype=np.float32), kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _tensors(folder: Path) -> Named:
    """Yield the model's tensors in float32, one at a time: numpy knows no bfloat16."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it has no other way to tell its names
                yield name, opened.get_tensor(name).float().numpy()


def _add(writer: Any, name: str, values: np.ndarray, kind: Any) -> None:
    """Matrices of whole blocks in `kind`; what routes tokens, norms and biases in float32."""
    is_matrix = values.ndim > 1 and name.endswith(".weight") and not any(part in name for part in ("ffn_gate_inp", "norm"))
    own = kind if is_matrix and values.shape[-1] % 32 == 0 else F32
    writer.add_tensor(name, gguf.quants.quantize(values, own), raw_dtype=own)


def _put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    for data in writer.kv_data:
        data.pop(key, None)
    if value is not None:
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind)


def _gguf_name(table: Any, name: str) -> str:
    if name.startswith(("blk.", "rope_")):
        return name
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(f"gguf has no name for {name}")
    return str(found)


def _first(config: Config, *keys: str, default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)


# Keys


def _write_common(writer: Any, config: Config) -> None:
    """Write what the converter's base class writes."""
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    for role in ("bos", "eos"):
        if isinstance(config.get(f"{role}_token_id"), int):
            getattr(writer, f"add_{role}_token_id")(config[f"{role}_token_id"])
    writer.add_block_count(_first(config, "num_hidden_layers", "n_layer"))
    writer.add_context_length(_first(config, "max_position_embeddings", "n_positions", default=2048))
    writer.add_embedding_length(_first(config, "hidden_size", "n_embd"))
    writer.add_feed_forward_length(_first(config, "intermediate_size", "n_inner", default=4 * config.get("n_embd", 0)))
    writer.add_head_count(_first(config, "num_attention_heads", "n_head"))
    if (heads := config.get("num_key_value_heads")) is not None:
        writer.add_head_count_kv(heads)
    _write_rope(writer, config)
    if (eps := _first(config, "rms_norm_eps", "norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")) is not None:
        writer.add_layer_norm_eps(eps)
    counts = {"expert_count": ("num_local_experts", "num_experts"), "expert_used_count": ("num_experts_per_tok",)}
    counts |= {"expert_group_count": ("n_group",), "expert_group_used_count": ("topk_group",)}
    for name, keys in counts.items():
        if (count := _first(config, *keys)) is not None:
            getattr(writer, f"add_{name}")(count)
    if (head_dim := config.get("head_dim")) is not None and config["model_type"] not in ("granite", "granitemoe"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _rope(config: Config) -> Config:
    params: Config = config.get("rope_parameters") or {}
    own: Config = params.get("full_attention", params)
    return own


def _write_rope(writer: Any, config: Config) -> None:
    params = _rope(config)
    if params.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(params["factor"])
        writer.add_rope_scaling_orig_ctx_len(params["original_max_position_embeddings"])
    if params.get("rope_theta") is not None:
        writer.add_rope_freq_base(params["rope_theta"])
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    if local.get("rope_theta") is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])


def _head_dim(config: Config) -> int:
    own: int = config.get("head_dim") or _first(config, "hidden_size", "n_embd") // _first(
        config, "num_attention_heads", "n_head"
    )
    return own


def _nothing(writer: Any, config: Config) -> None:
    pass


def _rotated(writer: Any, config: Config) -> None:
    writer.add_rope_dimension_count(int(_head_dim(config) * _rope(config).get("partial_rotary_factor", 1.0)))


def _window(writer: Any, config: Config) -> None:
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _window_pattern(writer: Any, config: Config) -> None:
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _gemma2(writer: Any, config: Config) -> None:
    _window(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _phi3(writer: Any, config: Config) -> None:
    _rotated(writer, config)
    writer.add_sliding_window(config.get("sliding_window") or 0)
    params = _rope(config)
    if params.get("long_factor"):
        original = params["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))


def _cohere(writer: Any, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _cohere2(writer: Any, config: Config) -> None:
    _cohere(writer, config)
    _window(writer, config)
    writer.add_rope_dimension_count(_head_dim(config))


def _granite(writer: Any, config: Config) -> None:
    _rotated(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _qwen_moe(writer: Any, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _gpt_oss(writer: Any, config: Config) -> None:
    _window(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _grouped_experts(writer: Any, config: Config) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _glm4_moe(writer: Any, config: Config) -> None:
    _rotated(writer, config)
    _grouped_experts(writer, config)


def _deepseek(writer: Any, config: Config) -> None:
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length"):
        _put(writer, f"deepseek2.{key}", None)
    _grouped_experts(writer, config)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if config["old_latent"]:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(width)
        writer.add_value_length(config["v_head_dim"])
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(width)
        writer.add_value_length_mla(config["v_head_dim"])
    if whole := _rope(config).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * whole)


def _minicpm3(writer: Any, config: Config) -> None:
    _put(writer, "minicpm3.attention.value_length", None)
    _put(writer, "minicpm3.attention.key_length", None)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def _parallel(writer: Any, config: Config) -> None:
    _rotated(writer, config)
    writer.add_parallel_residual(config["use_parallel_residual"])


def _falcon(writer: Any, config: Config) -> None:
    _put(writer, "falcon.rope.freq_base", None)
    writer.add_tensor_data_layout("jploski")
    writer.add_head_count_kv(_falcon_kv_heads(config))
    _put(writer, "falcon.feed_forward_length", config["ffn_hidden_size"])


def _falcon_kv_heads(config: Config) -> int:
    return int(config["num_kv_heads"]) if config["new_decoder_architecture"] else 1


def _starcoder(writer: Any, config: Config) -> None:
    _put(writer, "starcoder.attention.head_count_kv", None)
    writer.add_head_count_kv(1 if config["multi_query"] else config["n_head"])


def _ernie_moe(writer: Any, config: Config) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["moe_num_shared_experts"])


# Tensors


def _plain(name: str, values: np.ndarray, config: Config) -> Named:
    yield name, values


def _permuted(name: str, values: np.ndarray, config: Config) -> Named:
    """Put the halves of query and key heads in turn, as llama.cpp rotates them."""
    found = re.search(r"\.(q|k)_proj\.(weight|bias)$", name)
    if found:
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    yield name, values


def _norm_plus_one(name: str, values: np.ndarray, config: Config) -> Named:
    if name == "lm_head.weight" and config["tie_word_embeddings"]:
        return
    yield name, values + np.float32(1) if name.endswith("norm.weight") else values


def _granite_moe(name: str, values: np.ndarray, config: Config) -> Named:
    for part, kind in (("block_sparse_moe.input_linear", "exps"), ("shared_mlp.input_linear", "shexp")):
        if name.endswith(f"{part}.weight"):
            layer = name.split(".")[2]
            for own, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
                yield f"blk.{layer}.ffn_{own}_{kind}.weight", half
            return
    yield from _permuted(name, values, config)


def _gpt_oss_experts(name: str, values: np.ndarray, config: Config) -> Named:
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("self_attn.sinks"):
        yield f"blk.{layer}.attn_sinks.weight", values
    elif ".experts.gate_up_proj" in name:
        kind, values = ("bias", values) if name.endswith("_bias") else ("weight", values.swapaxes(-1, -2))
        halves = (values[:, ::2], values[:, 1::2])
        for own, half in zip(("gate", "up"), halves, strict=True):
            yield f"blk.{layer}.ffn_{own}_exps.{kind}", half
    elif ".experts.down_proj" in name:
        is_bias = name.endswith("_bias")
        yield f"blk.{layer}.ffn_down_exps.{'bias' if is_bias else 'weight'}", values if is_bias else values.swapaxes(-1, -2)
    else:
        yield name, values


def _split_latent(name: str, values: np.ndarray, config: Config) -> Named:
    if not name.endswith("kv_b_proj.weight") or config["old_latent"]:
        yield name, values
        return
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = values.reshape(heads, nope + config["v_head_dim"], -1)
    layer = name.split(".")[2]
    yield f"blk.{layer}.attn_k_b.weight", both[:, :nope].swapaxes(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", both[:, nope:]


def _falcon_heads(name: str, values: np.ndarray, config: Config) -> Named:
    """Put queries before keys before values, instead of group by group."""
    if "query_key_value" in name:
        heads, kv_heads = config["num_attention_heads"], _falcon_kv_heads(config)
        groups = values.reshape(kv_heads, heads // kv_heads + 2, _head_dim(config), *values.shape[1:])
        parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
        values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
    yield name, values


def _neox_heads(name: str, values: np.ndarray, config: Config) -> Named:
    if "query_key_value" in name:
        groups = values.reshape(config["num_attention_heads"], 3, _head_dim(config), *values.shape[1:])
        values = groups.swapaxes(0, 1).reshape(values.shape)
    yield name, values


def _transposed(name: str, values: np.ndarray, config: Config) -> Named:
    yield name, values.T if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else values


def _stacked(tensors: Named, config: Config) -> Named:
    """Stack the experts of a layer, which transformers stores one by one."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors:
        found = re.fullmatch(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            yield name, values
            continue
        part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(found[3], found[3])
        stacks.setdefault(f"{found[1]}.mlp.experts.{part}.weight", {})[int(found[2])] = values
    for name, parts in stacks.items():
        merged = name if config["model_type"] != "mixtral" else _as_mixtral(name)
        yield merged, np.stack([parts[index] for index in sorted(parts)])


def _as_mixtral(name: str) -> str:
    _, _, layer, *_, part, _ = name.split(".")
    return f"layers.{layer}.feed_forward.experts.{ {'gate_proj': 'w1', 'down_proj': 'w2', 'up_proj': 'w3'}[part] }.weight"


def _divisors(config: Config) -> Named:
    for key in ("long", "short"):
        if factors := _rope(config).get(f"{key}_factor"):
            yield f"rope_factors_{key}.weight", np.array(factors)


_ARCHITECTURES: dict[str, tuple[A, Change, _Keys]] = {
    "arcee": (A.ARCEE, _permuted, _rotated),
    "cohere": (A.COMMAND_R, _plain, _cohere),
    "cohere2": (A.COHERE2, _plain, _cohere2),
    "deepseek_v2": (A.DEEPSEEK2, _split_latent, _deepseek),
    "deepseek_v3": (A.DEEPSEEK2, _split_latent, _deepseek),
    "dots1": (A.DOTS1, _plain, _grouped_experts),
    "ernie4_5": (A.ERNIE4_5, _plain, _nothing),
    "ernie4_5_moe": (A.ERNIE4_5_MOE, _plain, _ernie_moe),
    "exaone4": (A.EXAONE4, _plain, _window_pattern),
    "falcon": (A.FALCON, _falcon_heads, _falcon),
    "gemma": (A.GEMMA, _norm_plus_one, _nothing),
    "gemma2": (A.GEMMA2, _norm_plus_one, _gemma2),
    "gemma3_text": (A.GEMMA3, _norm_plus_one, _window),
    "glm4": (A.GLM4, _plain, _rotated),
    "glm4_moe": (A.GLM4_MOE, _plain, _glm4_moe),
    "gpt2": (A.GPT2, _transposed, _nothing),
    "gpt_bigcode": (A.STARCODER, _plain, _starcoder),
    "gpt_neox": (A.GPTNEOX, _neox_heads, _parallel),
    "gpt_oss": (A.GPT_OSS, _gpt_oss_experts, _gpt_oss),
    "granite": (A.GRANITE, _permuted, _granite),
    "granitemoe": (A.GRANITE_MOE, _granite_moe, _granite),
    "granitemoeshared": (A.GRANITE_MOE, _granite_moe, _granite),
    "llama": (A.LLAMA, _permuted, _rotated),
    "minicpm3": (A.MINICPM3, _plain, _minicpm3),
    "mixtral": (A.LLAMA, _permuted, _rotated),
    "nemotron": (A.NEMOTRON, _norm_plus_one, _rotated),
    "olmo": (A.OLMO, _permuted, lambda writer, config: writer.add_layer_norm_eps(1e-5)),
    "olmo2": (A.OLMO2, _plain, _nothing),
    "olmo3": (A.OLMO2, _plain, _window_pattern),
    "olmoe": (A.OLMOE, _plain, _nothing),
    "phi": (A.PHI2, _plain, _rotated),
    "phi3": (A.PHI3, _plain, _phi3),
    "qwen2": (A.QWEN2, _plain, _nothing),
    "qwen2_moe": (A.QWEN2MOE, _plain, _qwen_moe),
    "qwen3": (A.QWEN3, _plain, _nothing),
    "qwen3_moe": (A.QWEN3MOE, _plain, _qwen_moe),
    "seed_oss": (A.SEED_OSS, _plain, _nothing),
    "smollm3": (A.SMOLLM3, _permuted, _rotated),
    "stablelm": (A.STABLELM, _plain, _parallel),
    "starcoder2": (A.STARCODER2, _plain, _nothing),
}
"""By transformers' model_type: the architecture, what is done to its tensors, and its keys."""

_DEFAULT_MSCALE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True}),
    "command-r": ("cohere", {"tie_word_embeddings": True}),
    "command-r, norms": ("cohere, qk norm", {"tie_word_embeddings": True}),
    "deepseek2, v2": ("deepseek_v2", {}),
    "deepseek2, v2 without q_lora": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek2, v3": (
        "deepseek_v3, yarn", {"rope_parameters": {**_DEFAULT_MSCALE, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "dots1": ("dots1", {"num_key_value_heads": 4}),
    "ernie4_5": ("ernie4_5", {"use_bias": False}),
    "ernie4_5-moe": ("ernie4_5_moe", {}),
    "exaone4": ("exaone4", {}),
    "exaone4, no windows": ("exaone4, no windows", {}),
    "falcon": ("falcon", {}),
    "falcon, new": ("falcon, new", {"bias": False}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "glm4moe": ("glm4_moe", {}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}),
    "gpt2": ("gpt2", {}),
    "gptneox": ("gpt_neox", {}),
    "gptneox, sequential": ("gpt_neox, sequential", {}),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe, shared": ("granitemoeshared", {}),
    "llama": ("llama", {"attention_bias": False, "mlp_bias": False}),
    "llama, yarn": ("llama, yarn", {}),
    "minicpm3": ("minicpm3", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": 16}),
    "mixtral": ("mixtral", {}),
    "nemotron": ("nemotron", {"mlp_bias": False}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo2, windows": ("olmo3", {}),
    "olmoe": ("olmoe", {"norm_topk_prob": False, "num_key_value_heads": 4}),
    "phi2": ("phi", {"intermediate_size": 256}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, longrope": ("phi3, longrope", {}),
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", {"decoder_sparse_step": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {}),
    "stablelm, parallel": ("stablelm, parallel", {}),
    "starcoder": ("gpt_bigcode", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
}  # fmt: skip
"""Architectures, and the variant of tests/support/tiny_families.py that becomes one: its config says what a header cannot."""
