"""Segments as token ids or as words: functions of the run's seed and the segment, so that equal segments are equal text."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from pdmesh.loadtest.targets.target import Said
from pdmesh.loadtest.workload import Segment

PromptKind = Literal["tokens", "words"]
# Tokenizers keep their special tokens and single bytes in front.
FIRST_TOKEN_ID = 300
# Short everyday words: most tokenizers make one token of each (with the space before it).
_COMMON = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an had they you were
their one all we can her has there been if more when will would who so no out up into than them only some could time these
two may then do first any my now such like our over man me even most made after also did many before must through back years
"""
WORDS = tuple(_COMMON.split())


def token_ids(segments: Iterable[Segment], seed: int, vocab_size: int) -> list[int]:
    """Ids from FIRST_TOKEN_ID to below `vocab_size`."""
    ids: list[int] = []
    for segment in segments:
        ids += _ids(segment, seed, vocab_size)
    return ids


def words(segments: Iterable[Segment], seed: int) -> str:
    """About one token for each word."""
    return " ".join(WORDS[number % len(WORDS)] for segment in segments for number in _numbers(segment, seed))


def conversation(said: Iterable[Said], seed: int) -> str:
    """The words of all turns, and the answers between them."""
    return " ".join(text for one in said for text in (words(one.segments, seed), *([one.answer.text] if one.answer else ())))


@lru_cache(maxsize=256)
def _ids(segment: Segment, seed: int, vocab_size: int) -> list[int]:
    span = vocab_size - FIRST_TOKEN_ID
    return [FIRST_TOKEN_ID + number % span for number in _numbers(segment, seed)]


def _numbers(segment: Segment, seed: int) -> memoryview:
    """So many random 32-bit numbers; a longer segment of the same key begins with the same ones."""
    return memoryview(random.Random(f"{seed}/{segment.key}").randbytes(4 * segment.num_tokens)).cast("I")
