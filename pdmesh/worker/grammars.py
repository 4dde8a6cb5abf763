"""What compiles constraints for the model of an engine."""

from __future__ import annotations

from pdmesh.engine.engine import Engine
from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer


def compiler_for(engine: Engine) -> GrammarCompiler | None:
    """With the vocabulary and the end-of-sequence tokens that the engine goes by; None when the model is no folder with a
    tokenizer (to read the one inside a .gguf file takes seconds, at every start)."""
    try:
        tokenizer = Tokenizer.load(engine.config.model)
    except (OSError, ValueError):
        return None
    return GrammarCompiler(tokenizer.to_json(), engine.model_config.vocab_size, engine.eos_token_ids)
