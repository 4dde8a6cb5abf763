"""A model as the router knows it: its name and its tokenizer. No weights here."""

import contextlib
from dataclasses import dataclass
from functools import lru_cache

from pdmesh.runtime.config import ConfigError
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One model that clients may ask for."""

    name: str
    tokenizer: Tokenizer
    grammars: GrammarCompiler

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together."""
        return self.tokenizer.max_context

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output."""
        return self.tokenizer.eos_token_ids


def load(folders: dict[str, str]) -> dict[str, ServedModel]:
    """Models by name from NAME → folder; a folder that two names share is read once. Raises ConfigError."""
    read = lru_cache(maxsize=None)(_read)
    return {name: ServedModel(name, *read(folder)) for name, folder in folders.items()}


def _read(folder: str) -> tuple[Tokenizer, GrammarCompiler]:
    try:
        tokenizer = Tokenizer.load(folder)
    except (OSError, ValueError) as error:
        raise ConfigError("--models", str(error)) from error
    if not tokenizer.max_context:
        raise ConfigError("--models", f"{folder}/config.json names no max_position_embeddings", "add the model's config.json")
    grammars = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)
    with contextlib.suppress(ValueError):  # whoever asks for a constraint is told
        grammars.warm()
    return tokenizer, grammars
