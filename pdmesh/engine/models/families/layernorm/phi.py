"""Phi 1, 1.5 and 2: attention and MLP in parallel behind one LayerNorm, biases everywhere, a part of each head rotated."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Phi's config.json."""
    has_norms = config.flag("qk_layernorm")
    return decoder(
        config,
        Defaults(
            norm_eps=1e-5, activation="gelu_new", partial_rotary=0.5, max_context=2048, names={"rms_norm_eps": "layer_norm_eps"}
        ),
        norm="layer",
        norm_bias=True,
        parallel=True,
        mlp_norm=False,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm="head" if has_norms else "",
        qk_norm_bias=has_norms,
    )


FAMILY = Family(
    read,
    Names(
        {
            "model.norm": "model.final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        }
    ),
)
