"""nanochat: norms without weights, also of embeddings and of rotated heads, a plain MLP with squared relu, halves rotated
the other way round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, Place, Stored, changed, head_ones, joined, ones
from pdmesh.engine.models.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor


def read(config: ConfigReader) -> ModelConfig:
    """Read a nanochat's config.json."""
    bias = config.flag("attention_bias")
    softcap = config.optional_number("final_logit_softcapping") if "final_logit_softcapping" in config else 15.0
    return decoder(
        config,
        Defaults(activation="relu2"),
        qkv_bias=bias,
        output_bias=bias,
        gated_mlp=False,
        qk_norm="head",
        qk_norm_rotated=True,
        embedding_norm=True,
        logits_softcap=softcap or 0.0,
    )


def _halves_swapped(tensor: Tensor, place: Place) -> Tensor:
    """Exchange the halves of query or key heads: rotated the usual way round, they are then what nanochat's rotation gives."""
    heads = tensor.reshape(-1, 2, place.config.head_dim // 2, *tensor.shape[1:])
    return heads.flip(1).reshape(tensor.shape)


_NO_WEIGHTS = ("model.norm", "model.embed_norm", "input_layernorm", "post_attention_layernorm")
FAMILY = Family(
    read,
    Names(
        joined(
            {stem: Stored("", (ones,)) for stem in _NO_WEIGHTS},
            {stem: Stored("", (head_ones,)) for stem in ("self_attn.q_norm", "self_attn.k_norm")},
            changed(_halves_swapped, ["self_attn.q_proj", "self_attn.k_proj"]),
            {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
        )
    ),
)
