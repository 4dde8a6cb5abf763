"""Falcon with rotary embedding: attention and MLP in parallel, one or two LayerNorms, few key/value heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored, fused_qkv, grouped_qkv, joined
from pdmesh.engine.models.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor


def read(config: ConfigReader) -> ModelConfig:
    """Read a Falcon's config.json. The two architectures differ in their norms and in how their heads are stored."""
    config.require("alibi", False)
    is_new, bias = config.flag("new_decoder_architecture"), config.flag("bias")
    heads, hidden = config.count("num_attention_heads", "n_head"), config.count("hidden_size")
    is_shared = config.flag("multi_query", True)
    kv_heads = (config.optional_count("num_kv_heads", "n_head_kv") or heads) if is_new else 1 if is_shared else heads
    config.ignore("num_kv_heads", "n_head_kv")
    norms = config.optional_count("num_ln_in_parallel_attn")
    norms = (2 if is_new else 1) if norms is None else norms
    parallel = config.flag("parallel_attn", True) or is_new
    names = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation"}
    if "n_head" in config:
        names |= {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    return decoder(
        config,
        Defaults(max_context=2048, norm_eps=1e-5, tie=True, activation="gelu", names=names),
        num_kv_heads=kv_heads,
        intermediate_size=config.optional_count("ffn_hidden_size") or 4 * hidden,
        norm="layer",
        norm_bias=True,
        parallel=parallel,
        mlp_norm=not parallel or (is_new and norms == 2),
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def _qkv(stem: str) -> dict[str, Stored]:
    """Return the stems of either kind: one shared head lies behind all queries; else a head lies behind its own queries."""
    shared, own = fused_qkv(stem), grouped_qkv(stem)

    def either(name: str) -> Stored:
        def change(tensor: Tensor, place: Place) -> Tensor:
            return (shared if place.config.num_kv_heads == 1 else own)[name].change[0](tensor, place)

        return Stored(stem, (change,))

    return {name: either(name) for name in shared}


_COMMON = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
ONE_NORM = Names(joined(_COMMON, _qkv("self_attention.query_key_value")), "transformer.h.{}")
TWO_NORMS = Names(
    joined(ONE_NORM.stems, {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}), "transformer.h.{}"
)
FAMILY = Family(read, ONE_NORM, lambda config: TWO_NORMS if config.parallel and config.mlp_norm else ONE_NORM)
