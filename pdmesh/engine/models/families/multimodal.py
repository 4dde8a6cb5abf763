"""The text part of checkpoints that also read images: Gemma 3, Llama 4, and Mistral Small 3.1 and Ministral 3.

Their config.json holds a text model's under `text_config`, and their text tensors begin with `language_model.`; a prompt of text
alone is computed as by that text model. Nothing computes the other tensors, and prompts have no images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdmesh.engine.models.config import ModelConfig, token_ids
from pdmesh.engine.models.family import Family
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

_OTHERS = r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*"


def text_part(families: Mapping[str, Family]) -> Family:
    """Return the family of checkpoints whose text models are of these, by their `model_type`; all have the same names."""

    def read(config: ConfigReader) -> ModelConfig:
        text = config.section("text_config")
        if text is None:
            raise ValueError("config.json has no text_config; it is needed to build the text model")
        config.ignore(*(key for key in config if key != "text_config"))
        kind = str(text.get("model_type"))
        if kind not in families:
            raise UnsupportedModel(f"text_config.model_type {kind!r} is not supported; this engine runs {', '.join(families)}")
        return _around(config, text, families[kind].read(text))

    names = next(iter(families.values())).names
    ignored = f"{names.ignored}|{_OTHERS}"
    return Family(read, replace(names, prefix="language_model.", ignored=ignored))


def _around(config: ConfigReader, text: ConfigReader, model: ModelConfig) -> ModelConfig:
    """Return the text model with what is said outside of its own config: end tokens, dtype, tied embeddings."""
    is_tied = (
        model.tie_word_embeddings
        if "tie_word_embeddings" in text
        else config.flag("tie_word_embeddings", model.tie_word_embeddings)
    )
    dtype = config.get("dtype") or config.get("torch_dtype")
    return replace(
        model,
        model_type=str(config["model_type"]),
        eos_token_ids=token_ids(config.get("eos_token_id")) or model.eos_token_ids,
        dtype=model.dtype if dtype is None else str(dtype).removeprefix("torch."),
        tie_word_embeddings=is_tied,
    )
