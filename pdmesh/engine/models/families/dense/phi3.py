"""Phi 3, 3.5 and 4: a Llama whose maps of one input are stored as one."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, fused_gate_up, fused_qkv, joined
from pdmesh.engine.models.reader import ConfigReader


def read(config: ConfigReader) -> ModelConfig:
    """Read a Phi 3's config.json."""
    config.require("attention_bias", False)
    window, num_layers = config.optional_count("sliding_window"), config.count("num_hidden_layers")
    return decoder(config, Defaults(norm_eps=1e-5), windows=(window or None,) * num_layers)


FAMILY = Family(read, Names(joined(fused_qkv("self_attn.qkv_proj"), fused_gate_up("mlp.gate_up_proj"))))
