"""Where the tensors of a GGUF file lie: llama.cpp's names, and what its converter has done to the tensors. No torch.

Its converter adds 1 to norms that store their distance from 1, puts fused heads in the order queries, keys, values, transposes
GPT-2's maps, and stacks a layer's experts. Heads are in the order of neighbours where llama.cpp rotates neighbours: it permutes
those of Llama and its kin, and leaves those that were trained so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdmesh.engine.models.families.dense.helium import PAIRS as HEADS
from pdmesh.engine.models.families.experts.granitemoe import gate, own, up
from pdmesh.engine.models.families.latent.deepseek import key_pairs, query_pairs
from pdmesh.engine.models.families.layernorm.cohere import norm_halves
from pdmesh.engine.models.names import Names, Stored, columns, fused_gate_up, fused_qkv, halves_from_pairs, joined, ones

if TYPE_CHECKING:
    from pdmesh.engine.loader.gguf.header import Header

_COMMON: dict[str, str | Stored] = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_self_attn_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": Stored("attn_sinks", (), {"": "weight"}),
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_norm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj": "attn_kv_a_mqa",
    "self_attn.kv_a_norm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.correction": Stored("exp_probs_b", (lambda tensor, place: tensor.flatten(),), {"correction": "bias"}),
    "mlp.experts.{}.gate_proj": Stored("ffn_gate_exps", (own,)),
    "mlp.experts.{}.up_proj": Stored("ffn_up_exps", (own,)),
    "mlp.experts.{}.down_proj": Stored("ffn_down_exps", (own,)),
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_gate": Stored("ffn_gate_inp_shexp", (columns(lambda config: config.hidden_size),)),
}

Stems = Mapping[str, str | Stored]
PAIRS: Stems = {stem: Stored(str(_COMMON[stem]), (halves_from_pairs,)) for stem in HEADS}
"""Of architectures in which neighbours are rotated together."""
PAIRED_NORMS: Stems = {f"self_attn.{n}_norm": Stored(f"attn_{n}_norm", (norm_halves,)) for n in "qk"}
"""And whose norms have a weight for each head."""
LATENT_PAIRS: Stems = {
    "self_attn.q_proj": Stored("attn_q", (query_pairs,)),
    "self_attn.q_b_proj": Stored("attn_q_b", (query_pairs,)),
    "self_attn.kv_a_proj": Stored("attn_kv_a_mqa", (key_pairs,)),
}
"""Of latent attention in which neighbours are."""
MLP_NORM_BEHIND: Stems = {"post_attention_layernorm": "post_attention_norm"}
"""Of architectures that call the norm before the MLP by its place behind attention."""
NO_NORM_WEIGHTS: Stems = {stem: Stored("", (ones,)) for stem in ("model.norm", "input_layernorm", "post_attention_layernorm")}
TWO_NORMS: Stems = {"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"}
"""Of a Falcon with a norm for attention and one for the MLP: the first name is the MLP's."""
FUSED_GATE: Stems = fused_gate_up("ffn_up")
_OWN_GATE: Stems = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
_ONE_BY_ONE: Stems = {f"mlp.experts.{{}}.{n}_proj": f"ffn_{n}.{{}}" for n in ("gate", "up", "down")}
_JOINED_EXPERTS: Stems = {
    "mlp.experts.{}.gate_proj": Stored("ffn_gate_up_exps", (gate,)),
    "mlp.experts.{}.up_proj": Stored("ffn_gate_up_exps", (up,)),
}
NOT_WEIGHTS = r"rope_freqs\.weight|rope_factors_(long|short)\.weight"
"""Divisors of rotary frequencies: they become rope parameters (header.py)."""


def names_of(header: Header, stems: Stems) -> Names:
    """Return where the tensors of this file lie. `stems`: what its architecture names in another way. Fused maps and stacks of
    experts are known by their tensors: converters of different years wrote them differently."""
    table = joined(_COMMON, stems)
    if header.has("attn_qkv.weight"):
        table |= _fused(table)
    if header.has("ffn_gate.weight"):
        table |= _OWN_GATE
    if any(header.layers_with("ffn_gate.0.weight")):
        table |= _ONE_BY_ONE
    if any(header.layers_with("ffn_gate_up_exps.weight")):
        table |= _JOINED_EXPERTS
    dropped = "|".join(rf"blk\.{layer}\..*" for layer in range(header.num_layers, header.integer("block_count")))
    return Names(table, "blk.{}", f"{NOT_WEIGHTS}|{dropped}" if dropped else NOT_WEIGHTS)


def _fused(table: Stems) -> dict[str, Stored]:
    """Return the stems of one map of queries, keys and values; what is done to queries and keys follows."""
    found = {}
    for stem, stored in fused_qkv("attn_qkv").items():
        alone = table[stem]
        found[stem] = Stored(stored.stem, (*stored.change, *(alone.change if isinstance(alone, Stored) else ())))
    return found
