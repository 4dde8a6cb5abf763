"""Finds stop strings in a stream of text.

The stop string that is *complete first*, reading character by character, ends the text; of several that complete with the same
character the longest counts (it starts earliest, so the least is emitted). This rule needs no look-ahead, so the result depends
on the characters alone, not on their grouping into tokens and deltas, and a replayed history decides alike.

Algorithm: Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18(6), 1975. The depth of the
automaton's state is the length of the longest suffix that begins a stop string: just that much is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Hold the text that may be sent, and the stop string that ended it, if any."""

    text: str
    matched: str | None


class StopChecker:
    """Watch one stream for any of `stop`, a few non-empty strings."""

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise ValueError("stop: an empty string would end every output before it begins; leave it out")
        self._automaton = _Automaton(stop)
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """Return the stop string that ended the stream; None while it goes on."""
        return self._matched

    def push(self, text: str) -> StopResult:
        """Return what may be sent after `text`. After a match everything is dropped."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._state and self._automaton.first_characters.isdisjoint(text):
            return StopResult(text, None)
        return self._scan(text)

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _scan(self, text: str) -> StopResult:
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.next_state(self._state, character)
            self._matched = self._automaton.complete[self._state]
            if self._matched is not None:
                self._held = ""
                return StopResult(pending[: position - len(self._matched)], self._matched)
        num_safe = len(pending) - self._automaton.depth[self._state]
        self._held = pending[num_safe:]
        return StopResult(pending[:num_safe], None)


class _Automaton:
    """Match all strings at once. State 0 is the root. `complete[s]` is the longest stop string that ends in state s, or None."""

    def __init__(self, words: Sequence[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        self.complete: list[str | None] = [None]
        for word in words:
            self._add(word)
        self.first_characters = frozenset(self._edges[0])
        self._link()

    def next_state(self, state: int, character: str) -> int:
        while state and character not in self._edges[state]:
            state = self._fallback[state]
        return self._edges[state].get(character, 0)

    def _add(self, word: str) -> None:
        state = 0
        for character in word:
            if character not in self._edges[state]:
                self._edges[state][character] = len(self._edges)
                self._edges.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.complete.append(None)
            state = self._edges[state][character]
        self.complete[state] = word

    def _link(self) -> None:
        """Set fallbacks breadth first: a state's fallback is shallower, so it is final when it is needed."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._edges[state].items():
                self._fallback[child] = self.next_state(self._fallback[state], character)
                queue.append(child)
            if self.complete[state] is None:
                self.complete[state] = self.complete[self._fallback[state]]
