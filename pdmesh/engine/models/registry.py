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
from pdmesh.engine.models.families.layernorm import (
    cohere,
    falcon,
    gpt2,
    gpt_neox,
    gptj,
    nemotron,
    opt,
    persimmon,
    phi,
    stablelm,
    starcoder2,
)
from pdmesh.engine.models.families.multimodal import text_part
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

FAMILIES: dict[str, Family] = {
    "apertus": arcee.APERTUS,
    "arcee": arcee.FAMILY,
    "biogpt": opt.BIOGPT,
    "codegen": gptj.CODEGEN,
    "cohere": cohere.COHERE,
    "cohere2": cohere.COHERE2,
    "cwm": llama.CWM,
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "dots1": glm_moe.DOTS1,
    "ernie4_5": ernie45.FAMILY,
    "ernie4_5_moe": ernie45_moe.FAMILY,
    "exaone4": exaone4.FAMILY,
    "exaone_moe": exaone4.MOE,
    "falcon": falcon.FAMILY,
    "flex_olmo": olmoe.FLEX,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3": text_part({"gemma3_text": gemma.GEMMA3}),
    "gemma3_text": gemma.GEMMA3,
    "glm": glm.GLM,
    "glm4": glm.GLM4,
    "glm4_moe": glm_moe.GLM4_MOE,
    "glm4_moe_lite": deepseek.GLM_LITE,
    "gpt2": gpt2.GPT2,
    "gpt_bigcode": gpt2.BIGCODE,
    "gpt_neo": gpt2.GPT_NEO,
    "gpt_neox": gpt_neox.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "gptj": gptj.FAMILY,
    "granite": granite.FAMILY,
    "granite_swa": granite.SWA,
    "granitemoe": granitemoe.FAMILY,
    "granitemoe_swa": granitemoe.SWA,
    "granitemoeshared": granitemoe.FAMILY,
    "helium": helium.FAMILY,
    "hunyuan_v1_dense": hunyuan.DENSE,
    "hunyuan_v1_moe": hunyuan.MOE,
    "hy_v3": glm_moe.HUNYUAN3,
    "hyperclovax": granite.HYPERCLOVAX,
    "internlm3": internlm3.FAMILY,
    "iquestcoder": llama.IQUEST,
    "jais2": nemotron.JAIS2,
    "llama": llama.FAMILY,
    "llama4": text_part({"llama4_text": llama4.FAMILY}),
    "llama4_text": llama4.FAMILY,
    "mellum": qwen_moe.MELLUM,
    "minicpm3": minicpm3.FAMILY,
    "minimax_m2": mixtral.MINIMAX_M2,
    "ministral": mistral.FAMILY,
    "ministral3": mistral.MINISTRAL3,
    "mistral": mistral.FAMILY,
    "mistral3": text_part({"mistral": mistral.FAMILY, "ministral3": mistral.MINISTRAL3}),
    "mixtral": mixtral.MIXTRAL,
    "nanochat": nanochat.FAMILY,
    "nemotron": nemotron.FAMILY,
    "olmo": olmo.OLMO,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "olmoe": olmoe.FAMILY,
    "opt": opt.FAMILY,
    "persimmon": persimmon.FAMILY,
    "phi": phi.FAMILY,
    "phi3": phi3.FAMILY,
    "phimoe": mixtral.PHIMOE,
    "qwen2": qwen.QWEN2,
    "qwen2_moe": qwen_moe.QWEN2_MOE,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen_moe.QWEN3_MOE,
    "seed_oss": seed_oss.FAMILY,
    "smollm3": smollm3.FAMILY,
    "solar_open": glm_moe.SOLAR,
    "stablelm": stablelm.FAMILY,
    "starcoder2": starcoder2.FAMILY,
    "vaultgemma": gemma.VAULTGEMMA,
    "youtu": deepseek.YOUTU,
}
"""By `model_type` of config.json."""

RECURRENT = frozenset({
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm",
    "zamba", "zamba2",
})  # fmt: skip
"""Families whose layers keep a state instead of keys and values for each token, or beside them."""


_GATED = "attention's output is multiplied with a learned gate"
_INDEXED = "an indexer chooses the keys that a query attends to"
_LINEAR_BIAS = "scores have a bias that grows with distance (ALiBi)"
_PER_LAYER = "every layer adds embeddings of its own"
LACKING = {
    "afmoe": _GATED,
    "bitnet": "attention and MLP have norms inside, and weights three values",
    "bloom": _LINEAR_BIAS,
    "dbrx": "queries, keys and values are clamped (clip_qkv)",
    "deepseek_v32": _INDEXED,
    "diffllama": "attention is the difference of two (differential attention)",
    "doge": "attention has a learned mask",
    "gemma3n_text": _PER_LAYER,
    "gemma4_text": _PER_LAYER,
    "glm_moe_dsa": _INDEXED,
    "jetmoe": "attention is a mixture of experts",
    "laguna": _GATED,
    "longcat_flash": "a layer has two attentions, and some experts give back what they read",
    "mimo_v2_flash": "keys and values have different widths",
    "mpt": _LINEAR_BIAS,
    "xglm": "positions are sines that are added to the embeddings",
}
"""Families that need a part which no backend computes, by `model_type`."""


def family_of(model_type: str) -> Family:
    """Return the family. Raises UnsupportedModel, saying what is missing."""
    if model_type in RECURRENT:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported: its layers have a recurrent state (state-space or linear attention), "
            "and this engine computes attention over cached keys and values alone"
        )
    if model_type in LACKING:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported: {LACKING[model_type]}, which this engine does not compute"
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
