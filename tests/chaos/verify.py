"""Is a stream the answer that an engine alone gives? Every token and every index counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Answer:
    """One request's output as it comes, beside the token ids `expected` of each choice."""

    def __init__(self, expected: Sequence[Sequence[int]]) -> None:
        self._expected = expected
        self._next_index = [0] * len(expected)
        self.num_tokens = 0
        self.num_wrong = 0
        self.num_lost = 0
        self.num_duplicated = 0

    def take(self, choice: int, first_index: int, token_ids: Sequence[int]) -> None:
        """Tokens of `choice` from `first_index` on."""
        if not token_ids:
            return
        self.num_lost += max(0, first_index - self._next_index[choice])
        self.num_duplicated += max(0, self._next_index[choice] - first_index)
        expected = self._expected[choice][first_index : first_index + len(token_ids)]
        same = sum(ours == theirs for ours, theirs in zip(token_ids, expected, strict=False))
        self.num_wrong += len(token_ids) - same  # what comes behind the expected end is wrong as well
        self.num_tokens += len(token_ids)
        self._next_index[choice] = max(self._next_index[choice], first_index + len(token_ids))

    def end(self) -> None:
        """The mesh says that it is complete."""
        for index, expected in zip(self._next_index, self._expected, strict=True):
            self.num_lost += max(0, len(expected) - index)
