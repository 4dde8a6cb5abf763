"""OPT: learned positions from the third row on, LayerNorm, a plain MLP with relu; BioGPT: with gelu and scaled embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored, joined
from pdmesh.engine.models.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor

_UNUSED_ROWS = 2


def read(config: ConfigReader) -> ModelConfig:
    """Read an OPT's config.json."""
    config.require("do_layer_norm_before", True)
    config.require("_remove_final_layer_norm", False)
    config.require("layer_norm_elementwise_affine", True)
    config.require("word_embed_proj_dim", config.count("hidden_size"))
    config.ignore("layerdrop")
    bias = config.flag("enable_bias", True)
    names = {"hidden_act": "activation_function", "intermediate_size": "ffn_dim"}
    return decoder(
        config,
        Defaults(tie=True, activation="relu", is_rotary=False, names=names),
        learned_positions=config.count("max_position_embeddings"),
        norm="layer",
        norm_bias=True,
        norm_eps=1e-5,
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def read_biogpt(config: ConfigReader) -> ModelConfig:
    """Read a BioGPT's config.json. `layer_norm_eps` is not what its layers are made with."""
    config.ignore("layer_norm_eps", "activation_dropout")
    is_scaled, hidden = config.flag("scale_embedding", True), config.count("hidden_size")
    return decoder(
        config,
        Defaults(tie=True, activation="gelu", is_rotary=False),
        learned_positions=config.count("max_position_embeddings"),
        norm="layer",
        norm_bias=True,
        norm_eps=1e-5,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_multiplier=hidden**0.5 if is_scaled else 1.0,
    )


def _without_first(tensor: Tensor, place: Place) -> Tensor:
    return tensor[_UNUSED_ROWS:]


_LAYER: dict[str, str | Stored] = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}


def _around(prefix: str, norm: str) -> dict[str, str | Stored]:
    return {
        "model.embed_tokens": f"{prefix}.embed_tokens",
        "model.embed_positions": Stored(f"{prefix}.embed_positions", (_without_first,)),
        "model.norm": f"{prefix}.{norm}",
    }


FAMILY = Family(read, Names(joined(_around("model.decoder", "final_layer_norm"), _LAYER), "model.decoder.layers.{}"))
BIOGPT = Family(
    read_biogpt,
    Names(joined(_around("biogpt", "layer_norm"), _LAYER, {"lm_head": "output_projection"}), "biogpt.layers.{}"),
)
