"""GPT-NeoX and Pythia: attention and MLP in parallel with a LayerNorm each, a part of each head rotated."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, grouped_qkv, joined
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a GPT-NeoX' config.json: in its first layout the rotary embedding's keys are `rotary_pct` and `rotary_emb_base`."""
    bias = config.flag("attention_bias", True)
    defaults = Defaults(
        norm_eps=1e-5,
        activation="gelu",
        rope_theta=config.number("rotary_emb_base", default=10000.0),
        partial_rotary=config.number("rotary_pct", default=0.25),
        names={"rms_norm_eps": "layer_norm_eps"},
    )
    return decoder(
        config,
        defaults,
        norm="layer",
        norm_bias=True,
        parallel=config.flag("use_parallel_residual", True),
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
    )


FAMILY = Family(
    read,
    Names(
        joined(
            {
                "model.embed_tokens": "gpt_neox.embed_in",
                "model.norm": "gpt_neox.final_layer_norm",
                "lm_head": "embed_out",
                "self_attn.o_proj": "attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            grouped_qkv("attention.query_key_value"),
        ),
        "gpt_neox.layers.{}",
        r".*\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",
    ),
)
