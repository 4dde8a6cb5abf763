"""The architectures of GGUF files: each header becomes the config.json that transformers would read, and so the family's own
reader says what the model is (pdmesh/engine/models/families/). No torch.

What llama.cpp knows by the architecture's name alone, a header does not say: it stands here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.engine.loader.gguf import names
from pdmesh.engine.loader.gguf.header import Header
from pdmesh.engine.models.families.layernorm.gpt2 import KEYS as GPT2_KEYS
from pdmesh.engine.models.names import joined
from pdmesh.engine.models.reader import UnsupportedModel

Content = dict[str, object]
_RMS, _LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class Architecture:
    """Say how one architecture's header is read. `model_type`: of the family. `more`: what its config.json says beyond a Llama's;
    it comes last, and may name another model_type. `eps`: the key of the norms' epsilon there, `eps_key`: in the header.
    `spelled`: keys that the family spells in its own way. `biases`: keys of config.json that say whether maps have biases."""

    model_type: str
    more: Callable[[Header], Content] = lambda header: {}
    stems: names.Stems = field(default_factory=dict)
    eps: str = "rms_norm_eps"
    eps_key: str = _RMS
    spelled: Mapping[str, str] = field(default_factory=dict)
    biases: Sequence[str] = ()

    def config(self, header: Header) -> Content:
        """Return the content of config.json. Raises ValueError naming file and key."""
        base = _common(header)
        content = {self.spelled.get(key, key): value for key, value in base.items()}
        content |= {"model_type": self.model_type, self.eps: header.number(self.eps_key)}
        content |= {key: header.has(*_BIASES[key]) for key in self.biases}
        if scaling := header.rope_scaling():
            content["rope_scaling"] = scaling
        return content | self.more(header)


_QKV_BIAS = ("attn_q.bias", "attn_qkv.bias")
_BIASES = {
    "attention_bias": _QKV_BIAS, "qkv_bias": _QKV_BIAS, "use_qkv_bias": _QKV_BIAS, "use_bias": _QKV_BIAS, "bias": _QKV_BIAS,
    "attention_out_bias": ("attn_output.bias",), "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
}  # fmt: skip
_LLAMA_BIASES = ("attention_bias", "mlp_bias")


def _common(header: Header) -> Content:
    """Return the keys of all families, in Llama's spelling."""
    heads = header.integer("attention.head_count")
    return {
        "torch_dtype": "float32",
        "vocab_size": header.shape("token_embd.weight")[0],
        "hidden_size": header.integer("embedding_length"),
        "intermediate_size": header.integer("feed_forward_length"),
        "num_hidden_layers": header.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer("attention.head_count_kv", heads),
        "head_dim": header.head_dim,
        "max_position_embeddings": header.integer("context_length"),
        "rope_theta": header.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not header.has("output.weight"),
        **header.token_ids(),
    }


def _partial(header: Header) -> Content:
    """Return the rotated share of a head, from the count of rotated dimensions."""
    rotated, width = header.integer("rope.dimension_count", header.head_dim), header.head_dim
    share = rotated / width
    return {"partial_rotary_factor": share if int(width * share) == rotated else math.nextafter(share, 2.0)}


# Llama's kin


def _llama(header: Header) -> Content:
    """Return what makes a Mixtral of a Llama with experts."""
    if not header.integer("expert_count", 0):
        return {}
    header.require("expert_weights_norm", True)
    experts = {"num_local_experts": header.integer("expert_count"), "num_experts_per_tok": header.integer("expert_used_count")}
    return {"model_type": "mixtral", "attention_bias": None, "mlp_bias": None, **experts}


def _window(header: Header) -> Content:
    return {"sliding_window": header.integer("attention.sliding_window", 0) or None}


def _granite(header: Header) -> Content:
    return {
        "embedding_multiplier": header.number("embedding_scale", 1.0),
        "residual_multiplier": header.number("residual_scale", 1.0),
        "logits_scaling": header.number("logit_scale", 1.0),
        "attention_multiplier": header.number("attention.scale", header.head_dim**-0.5),
    }


def _granite_moe(header: Header) -> Content:
    shared = header.integer("expert_shared_feed_forward_length", 0)
    experts = {"num_local_experts": header.integer("expert_count"), "num_experts_per_tok": header.integer("expert_used_count")}
    more = {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}
    return {**_granite(header), **experts, **more}


# Gemma


_NOT_BY_HEAD = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size whose scores are scaled by hidden_size / heads, not by the width of a head."""


def _gemma2(header: Header) -> Content:
    window = header.integer("attention.sliding_window", 4096)
    return {
        **_gemma_scale(header),
        "attn_logit_softcapping": header.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.number("final_logit_softcapping", 30.0),
        "sliding_window": window,
        "layer_types": header.layer_types(2),
    }


def _gemma3(header: Header) -> Content:
    """Return what Gemma 3 has of its own; a file without a window is of a model without windows."""
    window = header.integer("attention.sliding_window", 0)
    return {
        **_gemma_scale(header),
        "final_logit_softcapping": header.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or header.integer("context_length"),
        "layer_types": header.layer_types(6) if window else ["full_attention"] * header.num_layers,
        "rope_theta": header.number("rope.freq_base", 1e6),
        "rope_local_base_freq": header.number("rope.freq_base_swa", 1e4),
    }


def _gemma_scale(header: Header) -> Content:
    by_hidden = header.num_layers == _NOT_BY_HEAD[header.architecture]
    heads = header.integer("attention.head_count")
    return {"query_pre_attn_scalar": header.integer("embedding_length") // heads if by_hidden else header.head_dim}


# Experts


def _qwen_moe(header: Header, *, normalize: bool) -> Content:
    """Return the experts; layers without a router have a dense MLP."""
    header.require("expert_gating_func", 1, 0)
    dense = [layer for layer, is_mixed in enumerate(header.layers_with("ffn_gate_inp.weight")) if not is_mixed]
    return {
        "num_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "moe_intermediate_size": _expert_width(header),
        "norm_topk_prob": header.flag("expert_weights_norm", normalize),
        "mlp_only_layers": dense,
    }


def _qwen2_moe(header: Header) -> Content:
    mixed = _first_mixed(header)
    shared = header.integer("expert_shared_feed_forward_length", header.shape(f"{mixed}.ffn_up_shexp.weight")[0])
    return {**_qwen_moe(header, normalize=False), "shared_expert_intermediate_size": shared}


def _qwen3_moe(header: Header) -> Content:
    return _qwen_moe(header, normalize=True)


def _olmoe(header: Header) -> Content:
    header.require("expert_gating_func", 1, 0)
    counts = {"num_experts": header.integer("expert_count"), "num_experts_per_tok": header.integer("expert_used_count")}
    return {**counts, "intermediate_size": _expert_width(header), "norm_topk_prob": header.flag("expert_weights_norm")}


def _gpt_oss(header: Header) -> Content:
    """Return what GPT-OSS has of its own; its published models do not round the bounds of YaRN's ramp."""
    scaling = header.rope_scaling()
    return {
        "num_local_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "intermediate_size": _expert_width(header),
        "sliding_window": header.integer("attention.sliding_window", 128),
        "layer_types": header.layer_types(2),
        **({"rope_scaling": {**scaling, "truncate": False}} if scaling and scaling["rope_type"] == "yarn" else {}),
    }


def _grouped_experts(header: Header) -> Content:
    """Return the experts of DeepSeek and of the families that took them."""
    inner = _expert_width(header)
    return {
        "n_routed_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "moe_intermediate_size": inner,
        "n_shared_experts": header.integer("expert_shared_count", 0),
        "first_k_dense_replace": header.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": header.flag("expert_weights_norm"),
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
    }


def _sigmoid_experts(header: Header) -> Content:
    header.require("expert_gating_func", 2)
    return _grouped_experts(header)


def _glm4_moe(header: Header) -> Content:
    return {**_partial(header), **_sigmoid_experts(header), "use_qk_norm": header.has("attn_q_norm.weight")}


def _ernie_moe(header: Header) -> Content:
    header.require("expert_gating_func", 1, 0)
    header.require("expert_weights_norm", True)
    header.ignore("expert_shared_feed_forward_length")
    return {
        "moe_num_experts": header.integer("expert_count"),
        "moe_k": header.integer("expert_used_count"),
        "moe_intermediate_size": _expert_width(header),
        "moe_num_shared_experts": header.integer("expert_shared_count", 0),
        "moe_layer_start_index": header.integer("leading_dense_block_count", 0),
        "moe_layer_interval": header.integer("interleave_moe_layer_step", 1),
    }


def _first_mixed(header: Header) -> str:
    """Return the first layer with experts, as tensors name it."""
    mixed = header.layers_with("ffn_gate_inp.weight")
    if True not in mixed:
        raise ValueError(f"{header.path}: no layer has a tensor 'ffn_gate_inp.weight'; the file is incomplete")
    return f"blk.{mixed.index(True)}"


def _expert_width(header: Header) -> int:
    """Return the inner width of an expert; older files do not say it, their tensors do."""
    if header.given("expert_feed_forward_length"):
        return header.integer("expert_feed_forward_length")
    return header.shape(f"{_first_mixed(header)}.ffn_down_exps.weight")[-1]


# Latent attention


def _deepseek2(header: Header) -> Content:
    """Return a DeepSeek-V2 or V3: the latter's experts are scored by a sigmoid. Files older than llama.cpp's latent cache give
    the widths of heads by other keys."""
    is_split = header.has("attn_k_b.weight")
    rope, suffix = header.integer("rope.dimension_count"), "_mla" if is_split else ""
    header.ignore("attention.key_length", "attention.value_length", "attention.head_count_kv")
    latent = {
        "q_lora_rank": header.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": header.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": header.integer(f"attention.key_length{suffix}") - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": header.integer(f"attention.value_length{suffix}"),
        "num_key_value_heads": header.integer("attention.head_count"),
    }
    header.require("expert_gating_func", 1, 2, 0)
    return {**latent, **_deepseek_experts(header), **_deepseek_scaling(header)}


def _deepseek_experts(header: Header) -> Content:
    experts = _grouped_experts(header)
    if header.integer("expert_gating_func", 1) == 2:
        return {"model_type": "deepseek_v3", **experts}
    grouped = header.integer("expert_group_count", 1) > 1
    return {**experts, "topk_method": "group_limited_greedy" if grouped else "greedy"}


def _deepseek_scaling(header: Header) -> Content:
    """Return YaRN's parameters: the files hold a tenth of `mscale_all_dim`, and mean an equal `mscale`."""
    scaling = header.rope_scaling()
    if not scaling:
        return {}
    whole = 10.0 * header.number("rope.scaling.yarn_log_multiplier", 0.0)
    return {"rope_scaling": {**scaling, "attention_factor": 1.0, "mscale": whole, "mscale_all_dim": whole}}


def _minicpm3(header: Header) -> Content:
    """Return what MiniCPM 3 has of its own; its multipliers are those of the one published model."""
    rope, heads = header.integer("rope.dimension_count"), header.integer("attention.head_count")
    nope = header.integer("attention.key_length") - rope
    value = header.shape("blk.0.attn_kv_b.weight")[0] // heads - nope
    header.require("attention.value_length", value)
    return {
        "q_lora_rank": header.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": header.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


# Windows, and layers without rotation


def _olmo2(header: Header) -> Content:
    """Return what makes an OLMo 3 of an OLMo 2 with windows."""
    window = header.integer("attention.sliding_window", 0)
    if not window:
        return {}
    theta = header.number("rope.freq_base", 10000.0)
    ropes = {
        "full_attention": {"rope_type": "default", **(header.rope_scaling() or {}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": header.number("rope.freq_base_swa", theta)},
    }
    windows = {"sliding_window": window, "layer_types": header.layer_types(4)}
    return {"model_type": "olmo3", **windows, "rope_parameters": ropes, "rope_scaling": None, "rope_theta": None}


def _exaone4(header: Header) -> Content:
    window = header.integer("attention.sliding_window", 0)
    types = header.layer_types(4) if window else ["full_attention"] * header.num_layers
    return {"sliding_window": window or None, "layer_types": types}


def _phi3(header: Header) -> Content:
    return {**_partial(header), "sliding_window": header.integer("attention.sliding_window", 0) or None}


# LayerNorm


def _olmo(header: Header) -> Content:
    return {"clip_qkv": header.number("attention.clamp_kqv", 0.0) or None}


def _cohere(header: Header) -> Content:
    normed = header.has("attn_q_norm.weight")
    return {"logit_scale": header.number("logit_scale"), "use_qk_norm": normed}


def _cohere2(header: Header) -> Content:
    window = {"sliding_window": header.integer("attention.sliding_window"), "layer_types": header.layer_types(4)}
    return {"logit_scale": header.number("logit_scale"), **window}


def _stablelm(header: Header) -> Content:
    """Return what StableLM has of its own. Converters wrote use_parallel_residual for models that are not parallel: those have a
    norm before the MLP."""
    header.ignore("use_parallel_residual")
    parallel = not header.has("ffn_norm.weight")
    return {**_partial(header), "use_parallel_residual": parallel, "qk_layernorm": header.has("attn_q_norm.weight")}


def _falcon(header: Header) -> Content:
    """Return a Falcon of either architecture: in a file, heads of both lie in one order."""
    header.require("tensor_data_layout", "jploski")
    has_two, kv_heads = header.has("attn_norm_2.weight"), header.integer("attention.head_count_kv", 1)
    if not has_two and kv_heads == 1:
        return {"ffn_hidden_size": header.integer("feed_forward_length"), "multi_query": True, "intermediate_size": None}
    return {
        "ffn_hidden_size": header.integer("feed_forward_length"),
        "intermediate_size": None,
        "new_decoder_architecture": True,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if has_two else 1,
    }


def _gpt_neox(header: Header) -> Content:
    return {**_partial(header), "use_parallel_residual": header.flag("use_parallel_residual", True)}


def _gpt2(header: Header) -> Content:
    kv_heads = header.integer("attention.head_count_kv", header.integer("attention.head_count"))
    if kv_heads != header.integer("attention.head_count"):
        raise UnsupportedModel(f"{header.path}: gpt2.attention.head_count_kv {kv_heads}: GPT-2's heads have keys of their own")
    header.ignore("rope.freq_base", "rope.dimension_count")
    return {"n_inner": header.integer("feed_forward_length"), **_UNROTATED}


def _starcoder(header: Header) -> Content:
    kv_heads = header.integer("attention.head_count_kv", header.integer("attention.head_count"))
    header.ignore("rope.freq_base", "rope.dimension_count")
    return {"n_inner": header.integer("feed_forward_length"), "multi_query": kv_heads == 1, **_UNROTATED}


_UNROTATED: Content = {"intermediate_size": None, "num_key_value_heads": None, "rope_theta": None}
_GPT2 = {"eps": "layer_norm_epsilon", "eps_key": _LAYER, "spelled": GPT2_KEYS}

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture("arcee", stems=names.PAIRS, biases=_LLAMA_BIASES),
    "cohere2": Architecture("cohere2", _cohere2, names.PAIRS, "layer_norm_eps", _LAYER, biases=("attention_bias",)),
    "command-r": Architecture(
        "cohere", _cohere, joined(names.PAIRS, names.PAIRED_NORMS), "layer_norm_eps", _LAYER, biases=("attention_bias",)
    ),
    "deepseek2": Architecture("deepseek_v2", _deepseek2, names.LATENT_PAIRS),
    "dots1": Architecture("dots1", _sigmoid_experts, biases=("attention_bias",)),
    "ernie4_5": Architecture("ernie4_5", stems=names.PAIRS, biases=("use_bias",)),
    "ernie4_5-moe": Architecture("ernie4_5_moe", _ernie_moe, names.PAIRS, biases=("use_bias",)),
    "exaone4": Architecture("exaone4", _exaone4),
    "falcon": Architecture("falcon", _falcon, {}, "layer_norm_epsilon", _LAYER, biases=("bias",)),
    "gemma": Architecture("gemma", biases=("attention_bias",)),
    "gemma2": Architecture("gemma2", _gemma2, biases=("attention_bias",)),
    "gemma3": Architecture("gemma3_text", _gemma3, biases=("attention_bias",)),
    "glm4": Architecture("glm4", _partial, joined(names.PAIRS, names.FUSED_GATE), biases=("attention_bias",)),
    "glm4moe": Architecture("glm4_moe", _glm4_moe, names.MLP_NORM_BEHIND, biases=("attention_bias",)),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, names.MLP_NORM_BEHIND, biases=("attention_bias",)),
    "gpt2": Architecture("gpt2", _gpt2, **_GPT2),  # type: ignore[arg-type]
    "gptneox": Architecture("gpt_neox", _gpt_neox, {}, "layer_norm_eps", _LAYER, biases=("attention_bias",)),
    "granite": Architecture("granite", _granite, names.PAIRS, biases=_LLAMA_BIASES),
    "granitemoe": Architecture("granitemoe", _granite_moe, names.PAIRS, biases=("attention_bias",)),
    "llama": Architecture("llama", _llama, names.PAIRS, biases=_LLAMA_BIASES),
    "minicpm3": Architecture("minicpm3", _minicpm3, biases=("attention_bias",)),
    "mistral": Architecture("mistral", _window),
    "nemotron": Architecture("nemotron", _partial, {}, "norm_eps", _LAYER, biases=_LLAMA_BIASES),
    "olmo": Architecture("olmo", _olmo, joined(names.PAIRS, names.NO_NORM_WEIGHTS), "", _LAYER, biases=("attention_bias",)),
    "olmo2": Architecture("olmo2", _olmo2, biases=("attention_bias",)),
    "olmoe": Architecture("olmoe", _olmoe, biases=("attention_bias",)),
    "phi2": Architecture("phi", _partial, {}, "layer_norm_eps", _LAYER),
    "phi3": Architecture("phi3", _phi3, names.FUSED_GATE, biases=("attention_bias",)),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe, biases=("qkv_bias",)),
    "qwen3": Architecture("qwen3", biases=("attention_bias",)),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe, biases=("attention_bias",)),
    "seed_oss": Architecture(
        "seed_oss", stems=names.MLP_NORM_BEHIND, biases=("attention_bias", "attention_out_bias", "mlp_bias")
    ),
    "smollm3": Architecture("smollm3", stems=names.PAIRS, biases=_LLAMA_BIASES),
    "stablelm": Architecture("stablelm", _stablelm, {}, "layer_norm_eps", _LAYER, biases=("use_qkv_bias",)),
    "starcoder": Architecture("gpt_bigcode", _starcoder, **_GPT2),  # type: ignore[arg-type]
    "starcoder2": Architecture("starcoder2", _window, {}, "norm_epsilon", _LAYER, biases=("use_bias",)),
}
"""By `general.architecture`."""


def stems_of(header: Header) -> names.Stems:
    """Return the names of tensors in which the file's architecture differs from others."""
    stems = ARCHITECTURES[header.architecture].stems
    return joined(stems, names.TWO_NORMS) if header.has("attn_norm_2.weight") else stems


def read_config(path: Path, header: Header) -> Content:
    """Return the config.json that transformers would read for this file. Raises ValueError, naming file and key, for an
    architecture, a key or a rotary scaling that is not supported."""
    kind = header.architecture
    if kind not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{path}: GGUF architecture {kind!r} is not supported; supported: {supported}")
    header.check_kind()
    content = ARCHITECTURES[kind].config(header)
    header.finish()
    return {key: value for key, value in content.items() if key}
