"""What the header of a GGUF file shows before any weight is read: missing, wrongly shaped and unused tensors."""

from __future__ import annotations

from pdmesh.engine.loader.builder import ask_for_all
from pdmesh.engine.loader.gguf.source import GgufSource

MAX_NAMED = 4


def check_gguf(source: GgufSource) -> list[str]:
    """Return the canonical names of all tensors that the model has. Raises ValueError for one that is missing or has another
    shape, and for one of the file that nothing uses: the architecture is then another."""
    given = source.on_meta()
    ask_for_all(given)
    unused = source.unused(given.taken)
    if unused:
        raise ValueError(
            f"{source.path}: tensors {', '.join(unused[:MAX_NAMED])} are used by nothing in architecture "
            f"{source.config.model_type}, so this model might be computed wrongly; use the model's Hugging Face folder"
        )
    return given.asked
