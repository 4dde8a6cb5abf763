"""GPT-J: attention and MLP in parallel behind one LayerNorm, the beginning of each head rotated, neighbours together. CodeGen:
the same with queries, values and keys stored as one map, in four shares of the heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.families.layernorm.gpt2 import KEYS
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Change, Names, Place, Stored, halves_from_pairs, joined
from pdmesh.engine.models.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor


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


def read_codegen(config: ConfigReader) -> ModelConfig:
    """Read a CodeGen's config.json."""
    read_config = read(config)
    if read_config.num_heads % _SHARES:
        raise ValueError(f"n_head {read_config.num_heads} is not a multiple of {_SHARES}, in which CodeGen stores its heads")
    return read_config


def _share(number: int) -> Change:
    """Return a change that takes the queries (0), values (1) or keys (2) out of the fused map."""

    def change(tensor: Tensor, place: Place) -> Tensor:
        shares = tensor.reshape(_SHARES, 3, -1, *tensor.shape[1:])
        return shares[:, number].reshape(-1, *tensor.shape[1:])

    return change


_SHARES = 4
_COMMON: dict[str, str | Stored] = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
}
_QKV: dict[str, str | Stored] = {
    "self_attn.q_proj": Stored("attn.q_proj", (halves_from_pairs,)),
    "self_attn.k_proj": Stored("attn.k_proj", (halves_from_pairs,)),
    "self_attn.v_proj": "attn.v_proj",
}
_FUSED: dict[str, str | Stored] = {
    "self_attn.q_proj": Stored("attn.qkv_proj", (_share(0), halves_from_pairs)),
    "self_attn.k_proj": Stored("attn.qkv_proj", (_share(2), halves_from_pairs)),
    "self_attn.v_proj": Stored("attn.qkv_proj", (_share(1),)),
}
_LAYERS, _IGNORED = "transformer.h.{}", r".*\.attn\.((masked_)?bias|causal_mask)"
FAMILY = Family(read, Names(joined(_COMMON, _QKV), _LAYERS, _IGNORED))
CODEGEN = Family(read_codegen, Names(joined(_COMMON, _FUSED), _LAYERS, _IGNORED))
