"""GLM and GLM 4: half of each head is rotated, neighbours together; GLM 4 has norms behind attention and MLP too."""

from __future__ import annotations

from pdmesh.engine.models.config import Defaults, ModelConfig, decoder
from pdmesh.engine.models.families.dense.helium import PAIRS
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.names import Names, changed, fused_gate_up, halves_from_pairs, joined
from pdmesh.engine.models.reader import ConfigReader

_DEFAULTS = Defaults(head_dim=128, norm_eps=1.5625e-07, partial_rotary=0.5)


def read_glm(config: ConfigReader) -> ModelConfig:
    """Read a GLM's config.json."""
    return decoder(config, _DEFAULTS, qkv_bias=config.flag("attention_bias", True))


def read_glm4(config: ConfigReader) -> ModelConfig:
    """Read a GLM 4's config.json."""
    return decoder(config, _DEFAULTS, qkv_bias=config.flag("attention_bias", True), post_norm=True)


_STEMS = joined(changed(halves_from_pairs, PAIRS), fused_gate_up("mlp.gate_up_proj"))
_BEHIND = {"post_self_attn_norm": "post_self_attn_layernorm", "post_mlp_norm": "post_mlp_layernorm"}
GLM, GLM4 = Family(read_glm, Names(_STEMS)), Family(read_glm4, Names(joined(_STEMS, _BEHIND)))
