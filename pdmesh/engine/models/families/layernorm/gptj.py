"""GPT-J: attention and MLP in parallel behind one LayerNorm, the beginning of each head rotated, neighbours together."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.families.layernorm.gpt2 import KEYS
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Stored, halves_from_pairs
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a GPT-J's config.json."""
    rotary, hidden = config.optional_count("rotary_dim"), config.count("n_embd")
    config.ignore("n_ctx", "rotary", "scale_attn_weights")
    read = decoder(
        config,
        Defaults(norm_eps=1e-5, activation="gelu_new", names=KEYS),
        intermediate_size=config.optional_count("n_inner") or 4 * hidden,
        norm="layer",
        norm_bias=True,
        parallel=True,
        mlp_norm=False,
        gated_mlp=False,
        mlp_bias=True,
        head_bias=True,
    )
    return replace(read, rope=replace(read.rope, rotary_dim=rotary or read.head_dim))


FAMILY = Family(
    read,
    Names(
        {
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "input_layernorm": "ln_1",
            "self_attn.q_proj": Stored("attn.q_proj", (halves_from_pairs,)),
            "self_attn.k_proj": Stored("attn.k_proj", (halves_from_pairs,)),
            "self_attn.v_proj": "attn.v_proj",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc_in",
            "mlp.down_proj": "mlp.fc_out",
        },
        "transformer.h.{}",
        r".*\.attn\.(masked_)?bias",
    ),
)
