"""Prompts of any length that share no beginning: consecutive pieces of the Python standard library's sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Hashable, Sequence
from pathlib import Path

from pdmesh.text.tokenizer import Tokenizer

_NUM_CHARACTERS = 2_000_000
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Paris"


class Prompts:
    """Deals out token ids. Whoever asks with the same key gets the same prompts, so that all contestants do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(_standard_library(_NUM_CHARACTERS))
        self._place = 0
        self._dealt: dict[Hashable, list[list[int]]] = {}
        self.question = list(tokenizer.encode(QUESTION))

    def deal(self, key: Hashable, count: int, length: int) -> list[list[int]]:
        """`count` prompts of exactly `length` tokens; other keys get other text."""
        if key not in self._dealt:
            self._dealt[key] = [self._next(length) for _ in range(count)]
        return self._dealt[key]

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _next(self, length: int) -> list[int]:
        if self._place + length > len(self._ids):
            self._place = self._place % 101 + 1  # once more from the top, cut elsewhere
        self._place += length
        return list(self._ids[self._place - length : self._place])


def _standard_library(num_characters: int) -> str:
    texts, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(texts[-1])
        if total >= num_characters:
            break
    return "".join(texts)
