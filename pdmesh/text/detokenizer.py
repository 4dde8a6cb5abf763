"""Token ids to text, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdmesh.text.decoder_stages import Stage


class DetokenizerSource(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def decoder_stages(self) -> list[Stage]:
        """Fresh stages of the tokenizer's decoder."""

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None if it has no text: special or unknown."""


class PieceStream:
    """Pieces of a vocabulary through a decoder's stages; `push` and `flush` give what has become certain."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def push(self, piece: str) -> str:
        return "".join(_feed(self._stages, (piece,)))

    def flush(self) -> str:
        behind = [self._stages[position + 1 :] for position in range(len(self._stages))]
        return "".join(text for stage, rest in zip(self._stages, behind, strict=True) for text in _feed(rest, stage.flush()))


class IncrementalDetokenizer:
    """The text of a growing sequence of tokens.

    All pushes and the flush joined are exactly `tokenizer.decode(ids, skip_special_tokens=True)`. A character whose bytes are
    spread over tokens comes out with the last of them. The cost of a token does not depend on how many came before.
    """

    def __init__(self, tokenizer: DetokenizerSource) -> None:
        self._piece_of = tokenizer.piece
        stages = tokenizer.decoder_stages()
        self._stream = PieceStream(stages)
        self._only_stage = stages[0].push if len(stages) == 1 else None  # byte-level vocabularies: the per-token path

    def push(self, token_id: int) -> str:
        """Text that is certain after `token_id`; often empty in the middle of a character."""
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        return self._stream.push(piece) if self._only_stage is None else "".join(self._only_stage(piece))

    def flush(self) -> str:
        """Text that was held back, at the end of the sequence; nothing may be pushed afterwards."""
        return self._stream.flush()


def _feed(stages: Sequence[Stage], pieces: Sequence[str]) -> Sequence[str]:
    for stage in stages:
        pieces = [out for piece in pieces for out in stage.push(piece)]
    return pieces
