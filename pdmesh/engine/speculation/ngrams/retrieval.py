"""Retrieval: tokens that followed the last tokens in recent outputs of this engine are likely to follow again.

He et al., "REST: Retrieval-Based Speculative Decoding" (2023), with the engine's own recent outputs as the store. Requests see
only outputs of requests with their own `cache_root` (tenant and identity); only `_Store.find` ensures that.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_

from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.ngrams.token_history import LONGEST, NO_MATCH, Match, Reading, Rungs, TokenTrail, match_length

NAME = "retrieval"
_SHORTEST = 3  # tokens of a match
_PLACE_BITS = 24


class Retrieval(Reading):
    """Propose by retrieval. It takes 4 bytes for each of `max_tokens` of outputs, and 16 bytes for each of `num_buckets`."""

    def __init__(self, max_tokens: int = 1 << 20, num_buckets: int = 1 << 19) -> None:
        rungs, store = Rungs(), _Store(max_tokens, num_buckets)
        self._store = store
        super().__init__(NAME, lambda sequence: _Reader(sequence, store, rungs))


class _Document:
    """Hold an output, after the last tokens of its prompt."""

    __slots__ = ("entered", "number", "root", "salt", "tokens")

    def __init__(self, number: int, root: bytes, tokens: Iterable[int]) -> None:
        self.number = number
        self.root = root
        self.salt = hash(root)
        self.tokens = array("i", tokens)
        self.entered = _SHORTEST - 1  # places before this one are indexed, or have too few tokens before them


class _Store:
    """Hold the latest outputs of all roots, and a table of each n-gram's last two occurrences. The oldest outputs are dropped
    first.

    The table is of fixed size, and entries overwrite each other. An entry is compared with the outputs before it is used.
    """

    def __init__(self, max_tokens: int, num_buckets: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._documents: dict[int, _Document] = {}
        self._last_number = 0
        self._num_buckets = num_buckets
        self._table = array("q", bytes(16 * num_buckets))  # two entries a bucket: document << _PLACE_BITS | place; 0: none

    def open(self, root: bytes, tokens: Sequence_[int]) -> _Document:
        self._last_number += 1
        document = _Document(self._last_number, root, tokens)
        self._documents[document.number] = document
        self._count(len(tokens))
        return document

    def append(self, document: _Document, new_tokens: Sequence_[int]) -> None:
        document.tokens.extend(new_tokens)
        if document.number in self._documents:
            self._count(len(new_tokens))

    def enter(self, document: _Document, most: int) -> int:
        """Enter missing n-grams of the document, except the last one, and at most so many; return how many."""
        tokens, first = document.tokens, document.entered
        last = min(len(tokens), first + most)
        table, head = self._table, document.number << _PLACE_BITS
        for place in range(first, last):
            if place >= _SHORTEST:
                bucket = self._bucket(document.salt, tokens, place)
                table[bucket + 1] = table[bucket]
                table[bucket] = head | place
        document.entered = max(first, last)
        return max(0, last - first)

    def find(self, document: _Document) -> tuple[Match, Match]:
        """Return what the last tokens of the document match in outputs of its own root: the better match, and another."""
        tokens, end = document.tokens, len(document.tokens)
        if end < _SHORTEST:
            return NO_MATCH, NO_MATCH
        bucket = self._bucket(document.salt, tokens, end)
        match = self._match(self._table[bucket], document)
        other = self._match(self._table[bucket + 1], document)
        return (match, other) if match[2] >= other[2] else (other, match)

    def _match(self, entry: int, document: _Document) -> Match:
        found = self._documents.get(entry >> _PLACE_BITS)
        if found is None or found.root != document.root:
            return NO_MATCH
        place = entry & ((1 << _PLACE_BITS) - 1)
        length = match_length(found.tokens, place, document.tokens, len(document.tokens), 0)
        return (found.tokens, place, length) if length >= _SHORTEST else NO_MATCH

    def _bucket(self, salt: int, tokens: Sequence_[int], place: int) -> int:
        return hash((salt, tokens[place - 3], tokens[place - 2], tokens[place - 1])) % self._num_buckets * 2

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        while self._num_tokens > self._max_tokens:
            oldest = self._documents.pop(next(iter(self._documents)))
            self._num_tokens -= len(oldest.tokens)


class _Reader:
    """Read one sequence that decodes, and its output in the store."""

    __slots__ = ("_before_output", "_document", "_store", "trail")

    def __init__(self, sequence: Sequence, store: _Store, rungs: Rungs) -> None:
        request = sequence.group.request
        begin = request.prompt[-LONGEST:]
        self._before_output = len(begin)
        self._store = store
        self._document = store.open(request.block_root, (*begin, *sequence.output))
        self.trail = TokenTrail(rungs, own=self._document.tokens)

    def read(self, output: list[int], most: int) -> int:
        """Take the new tokens and find the present place of the trail; return how many n-grams were entered."""
        document, trail, store = self._document, self.trail, self._store
        new_tokens = output[len(document.tokens) - self._before_output :]
        store.append(document, new_tokens)
        trail.follow(new_tokens)
        entered = store.enter(document, most)
        if not trail.is_secure:
            match, other = store.find(document)
            trail.choose(match, other, document.tokens[-1])
        return entered


def make(_parts: object) -> Retrieval:
    """Return a proposer for an engine; it needs none of the parts."""
    return Retrieval()
