"""The families that the engine runs: a new one is a file and a line of FAMILIES (docs/models.md shows how)."""

from __future__ import annotations

from collections.abc import Mapping

from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.families.dense import (
    arcee,
    ernie45,
    exaone4,
    gemma,
    glm,
    granite,
    helium,
    hunyuan,
    internlm3,
    llama,
    mistral,
    nanochat,
    olmo,
    phi3,
    qwen,
    seed_oss,
    smollm3,
)
from pdmesh.engine.models.families.experts import ernie45_moe, glm_moe, gpt_oss, granitemoe, llama4, mixtral, olmoe, qwen_moe
from pdmesh.engine.models.families.latent import deepseek, minicpm3
from pdmesh.engine.models.families.layernorm import cohere, falcon, gpt2, gpt_neox, gptj, nemotron, opt, phi, stablelm, starcoder2
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

FAMILIES: dict[str, Family] = {
    "arcee": arcee.FAMILY,
    "cohere": cohere.COHERE,
    "cohere2": cohere.COHERE2,
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "dots1": glm_moe.DOTS1,
    "ernie4_5": ernie45.FAMILY,
    "ernie4_5_moe": ernie45_moe.FAMILY,
    "exaone4": exaone4.FAMILY,
    "falcon": falcon.FAMILY,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "glm": glm.GLM,
    "glm4": glm.GLM4,
    "glm4_moe": glm_moe.GLM4_MOE,
    "gpt2": gpt2.GPT2,
    "gpt_bigcode": gpt2.BIGCODE,
    "gpt_neox": gpt_neox.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "gptj": gptj.FAMILY,
    "granite": granite.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "granitemoeshared": granitemoe.FAMILY,
    "helium": helium.FAMILY,
    "hunyuan_v1_dense": hunyuan.DENSE,
    "hunyuan_v1_moe": hunyuan.MOE,
    "internlm3": internlm3.FAMILY,
    "llama": llama.FAMILY,
    "llama4_text": llama4.FAMILY,
    "minicpm3": minicpm3.FAMILY,
    "ministral": mistral.FAMILY,
    "ministral3": mistral.MINISTRAL3,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.MIXTRAL,
    "nanochat": nanochat.FAMILY,
    "nemotron": nemotron.FAMILY,
    "olmo": olmo.OLMO,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "olmoe": olmoe.FAMILY,
    "opt": opt.FAMILY,
    "phi": phi.FAMILY,
    "phi3": phi3.FAMILY,
    "phimoe": mixtral.PHIMOE,
    "qwen2": qwen.QWEN2,
    "qwen2_moe": qwen_moe.QWEN2_MOE,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen_moe.QWEN3_MOE,
    "seed_oss": seed_oss.FAMILY,
    "smollm3": smollm3.FAMILY,
    "stablelm": stablelm.FAMILY,
    "starcoder2": starcoder2.FAMILY,
}
"""By `model_type` of config.json."""

RECURRENT = frozenset({
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "nemotron_h", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
})  # fmt: skip
"""Families whose layers keep a state instead of keys and values for each token, or beside them."""


def family_of(model_type: str) -> Family:
    """Return the family. Raises UnsupportedModel, saying what is missing."""
    if model_type in RECURRENT:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported: its layers have a recurrent state (state-space or linear attention), "
            "and this engine computes attention over cached keys and values alone"
        )
    if model_type not in FAMILIES:
        raise UnsupportedModel(f"model_type {model_type!r} is not supported; this engine runs {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def check_quantization(config: ConfigReader) -> None:
    """Raise UnsupportedModel where weights are quantized in a way that this engine does not read."""
    keys = ("quantization_config", "compression_config")
    config.ignore(*keys)
    if any(config.get(key) for key in keys):
        from pdmesh.engine.loader.quantized.registry import weight_format  # it needs torch, which planners of plain models lack

        weight_format(config)


def model_config(content: Mapping[str, object]) -> ModelConfig:
    """Read the content of config.json. Raises UnsupportedModel or ValueError, naming the key: also for one that no family has
    read, because what it says would not be computed."""
    reader = ConfigReader(content)
    model_type = str(reader.get("model_type", ""))
    family = family_of(model_type)
    check_quantization(reader)
    config = family.read(reader)
    unread = reader.unread()
    if unread:
        raise UnsupportedModel(
            f"{', '.join(unread)}: not read for model_type {model_type!r}, so this model might be computed wrongly; "
            f"--override {unread[0]}=null ignores it, if it changes nothing"
        )
    return config
