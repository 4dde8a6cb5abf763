"""GPT-2 and GPT-BigCode (StarCoder 1, SantaCoder): learned positions, LayerNorm, a plain MLP, queries, keys and values fused.
GPT-Neo: the same with maps of their own, scores that are not scaled, and windows."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Stored, fused_qkv, grouped_qkv, joined, transposed
from pdmesh.engine.models.reader import ConfigReader

KEYS = {
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
"""Keys that GPT-2 and its kin spell in their own way."""


def read_gpt2(config: ConfigReader) -> ModelConfig:
    """Read a GPT-2's config.json."""
    config.require("scale_attn_by_inverse_layer_idx", False)
    config.ignore("reorder_and_upcast_attn")  # the order of roundings in half precision
    return _decoder(config)


def read_bigcode(config: ConfigReader) -> ModelConfig:
    """Read a GPT-BigCode's config.json: with `multi_query` all heads share a key and a value."""
    heads = 1 if config.flag("multi_query", True) else config.count("n_head")
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads", "inference_runner")
    config.ignore("pre_allocate_kv_cache", "validate_runner_input", "max_sequence_length", "max_batch_size", "pad_key_length")
    return _decoder(config, num_kv_heads=heads)


def read_gpt_neo(config: ConfigReader) -> ModelConfig:
    """Read a GPT-Neo's config.json: `attention_types` says how often a list of kinds of layers follows itself."""
    num_layers, hidden = config.count("num_layers"), config.count("hidden_size")
    config.ignore("attention_layers", "embed_dropout", "resid_dropout")
    window = config.count("window_size", default=256)
    return decoder(
        config,
        Defaults(norm_eps=1e-5, tie=True, activation="gelu_new", is_rotary=False, names=_NEO_KEYS),
        intermediate_size=config.optional_count("intermediate_size") or 4 * hidden,
        learned_positions=config.count("max_position_embeddings"),
        windows=tuple(window if kind == "local" else None for kind in _neo_kinds(config, num_layers)),
        attention_scale=1.0,
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        output_bias=True,
        mlp_bias=True,
    )


def _neo_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    types = config.get("attention_types") or [[["global", "local"], num_layers // 2]]
    if not isinstance(types, list):
        raise ValueError(f"config.json: attention_types is {types!r}, not a list")
    kinds = [kind for pattern, count in types for _ in range(count) for kind in pattern]
    if len(kinds) != num_layers or set(kinds) - {"global", "local"}:
        raise ValueError(f"attention_types: {kinds}; this engine needs global or local for each of {num_layers} layers")
    return kinds


def _decoder(config: ConfigReader, **parts: object) -> ModelConfig:
    config.require("scale_attn_weights", True)
    config.ignore("n_ctx")
    hidden, positions = config.count("n_embd"), config.count("n_positions")
    return decoder(
        config,
        Defaults(norm_eps=1e-5, tie=True, activation="gelu_new", is_rotary=False, names=KEYS),
        intermediate_size=config.optional_count("n_inner") or 4 * hidden,
        learned_positions=positions,
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        **parts,
    )


def _names(qkv: dict[str, Stored], *change: object) -> Names:
    """Return the names of both; GPT-2's maps are stored transposed, GPT-BigCode's are not."""
    own = (transposed,) if change else ()
    common: dict[str, str | Stored] = {
        "model.embed_tokens": "transformer.wte",
        "model.embed_positions": "transformer.wpe",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": Stored("attn.c_proj", own),
        "mlp.up_proj": Stored("mlp.c_fc", own),
        "mlp.down_proj": Stored("mlp.c_proj", own),
    }
    return Names(joined(common, qkv), "transformer.h.{}", r".*\.attn\.(masked_)?bias")


def _bigcode_qkv() -> dict[str, Stored]:
    """Return the stems of either kind: one shared head lies behind all queries; else each head's three lie together."""
    shared, own = fused_qkv("attn.c_attn"), grouped_qkv("attn.c_attn")

    def either(stem: str) -> Stored:
        return Stored(
            "attn.c_attn",
            (lambda t, place: (shared if place.config.num_kv_heads == 1 else own)[stem].change[0](t, place),),
        )

    return {stem: either(stem) for stem in shared}


GPT2 = Family(read_gpt2, _names(fused_qkv("attn.c_attn", transposed), transposed))
_NEO_KEYS = {
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
GPT_NEO = Family(
    read_gpt_neo,
    Names(
        {
            "model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe",
            "model.norm": "transformer.ln_f",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            **{f"self_attn.{name}_proj": f"attn.attention.{name}_proj" for name in "qkv"},
            "self_attn.o_proj": "attn.attention.out_proj",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
        },
        "transformer.h.{}",
        r".*\.attn\.attention\.(masked_)?bias",
    ),
)
BIGCODE = Family(read_bigcode, _names(_bigcode_qkv()))
