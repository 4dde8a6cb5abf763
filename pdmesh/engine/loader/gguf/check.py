"""What the header of a GGUF file shows before any weight is read: missing, wrongly shaped and unused tensors."""

from __future__ import annotations

import torch

from pdmesh.engine.loader.builder import TorchBuilder
from pdmesh.engine.loader.gguf.source import GgufSource

MAX_NAMED = 4
_CONTEXT = 8  # tokens; tables of positions are made for so many


def check_gguf(source: GgufSource) -> list[str]:
    """Return the canonical names of all tensors that the model has. Raises ValueError for one that is missing or has another
    shape, and for one of the file that nothing uses: the architecture is then another."""
    given = source.on_meta()
    TorchBuilder(given, torch.float32, "meta").build(_CONTEXT, lambda _share, _text: None)
    unused = source.unused(given.taken)
    if unused:
        raise ValueError(
            f"{source.path}: tensors {', '.join(unused[:MAX_NAMED])} are used by nothing in architecture "
            f"{source.config.model_type}, so this model might be computed wrongly; use the model's Hugging Face folder"
        )
    return given.asked
