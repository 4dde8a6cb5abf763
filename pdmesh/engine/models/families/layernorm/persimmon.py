"""Persimmon: LayerNorm also of query and key heads, a plain MLP with squared relu, biases, half of each head rotated."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, grouped_qkv, joined
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Persimmon's config.json."""
    has_norms = config.flag("qk_layernorm", True)
    return decoder(
        config,
        Defaults(norm_eps=1e-5, activation="relu2", partial_rotary=0.5, names={"rms_norm_eps": "layer_norm_eps"}),
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm="head" if has_norms else "",
        qk_norm_bias=has_norms,
    )


FAMILY = Family(
    read,
    Names(
        joined(
            {
                "model.norm": "model.final_layernorm",
                "self_attn.o_proj": "self_attn.dense",
                "self_attn.q_norm": "self_attn.q_layernorm",
                "self_attn.k_norm": "self_attn.k_layernorm",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            grouped_qkv("self_attn.query_key_value"),
        )
    ),
)
