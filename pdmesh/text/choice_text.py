"""The text of one choice: detokenizer and stop strings together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdmesh.text.detokenizer import DetokenizerSource, IncrementalDetokenizer
from pdmesh.text.stop import StopChecker, StopResult


class ChoiceText:
    """Turns a choice's tokens into text that may go out.

    Args:
        tokenizer: of the model.
        stop: stop strings; the output ends before the first that appears (see `pdmesh.text.stop`).
        silent_token_ids: end-of-sequence and stop tokens: part of the ids, never of the text. Special tokens have no text anyway.

    A function of the tokens alone: a resumed stream that replays its history is in the same state.
    """

    def __init__(self, tokenizer: DetokenizerSource, stop: Sequence[str] = (), silent_token_ids: Collection[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopChecker(stop)
        self._can_stop = bool(stop)
        self._silent = frozenset(silent_token_ids)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; None while it goes on. May be set by `finish`, too."""
        return self._stop.matched

    def push(self, token_id: int) -> StopResult:
        """(text that may go out with this token, the stop string that it completed or None)."""
        if token_id in self._silent:
            return StopResult("", self._stop.matched)
        text = self._detokenizer.push(token_id)
        return self._stop.push(text) if self._can_stop else StopResult(text, None)

    def finish(self) -> str:
        """What was held back, when the choice has ended; empty after a match."""
        return self._stop.push(self._detokenizer.flush()).text + self._stop.flush()
