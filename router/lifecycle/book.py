"""The book of one request's output: each index once and in order, whatever arrives, how often and from where.

Tokens come from two streams (the first one from prefill, the others from decode) and, after a loss, again from another worker.
The book keeps what was accepted as history, holds back what is ahead of a gap, and counts a repeated index whose token differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.v1 import common_pb2

MAX_EARLY_TOKENS = 4096
"""Tokens of one choice that may wait for a gap to close. A gap lasts for milliseconds; more is a peer gone wrong."""

UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(slots=True)
class Span:
    """New output of one choice: consecutive tokens from `first_index` on; `logprobs` is empty or one for each token."""

    choice: int
    first_index: int
    token_ids: list[int]
    logprobs: Sequence[common_pb2.Logprobs] = ()
    finish_reason: common_pb2.FinishReason.ValueType = UNFINISHED


@dataclass(slots=True)
class _ChoicePages:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: common_pb2.FinishReason.ValueType = UNFINISHED
    early: list[Span] = field(default_factory=list)


class BookError(Exception):
    """A worker sent what no worker may send."""


class Book:
    """Output of `num_choices` choices, starting from what was emitted before (resume)."""

    def __init__(self, num_choices: int, emitted: Sequence[common_pb2.EmittedChoice] = ()) -> None:
        self._choices = [_ChoicePages() for _ in range(num_choices)]
        self.num_mismatches = 0
        for choice in emitted:
            self._choices[choice.index] = _ChoicePages(list(choice.token_ids), choice.finish_reason)

    @property
    def all_finished(self) -> bool:
        """Every choice has ended."""
        return all(pages.finish_reason for pages in self._choices)

    @property
    def num_tokens(self) -> int:
        """Accepted tokens of all choices, history included."""
        return sum(len(pages.token_ids) for pages in self._choices)

    @property
    def anything_emitted(self) -> bool:
        """Is there any history?"""
        return any(pages.token_ids or pages.finish_reason for pages in self._choices)

    @property
    def finish_reasons(self) -> tuple[common_pb2.FinishReason.ValueType, ...]:
        """One of each choice; unspecified: it goes on."""
        return tuple(pages.finish_reason for pages in self._choices)

    @property
    def has_gap(self) -> bool:
        """Some choice has tokens that wait for an earlier one."""
        return any(pages.early for pages in self._choices)

    def next_index(self, choice: int) -> int:
        """The output index that is needed next."""
        return len(self._choices[choice].token_ids)

    def is_finished(self, choice: int) -> bool:
        """Has this choice ended?"""
        return bool(self._choices[choice].finish_reason)

    def history(self) -> list[common_pb2.EmittedChoice]:
        """What the next attempt is forced to: nothing, or one entry for each choice."""
        if not self.anything_emitted:
            return []
        return [
            common_pb2.EmittedChoice(index=index, token_ids=pages.token_ids, finish_reason=pages.finish_reason)
            for index, pages in enumerate(self._choices)
        ]

    def accept(self, span: Span) -> list[Span]:
        """What of `span`, and of spans held back before it, is new now, in order. Raises BookError."""
        if not 0 <= span.choice < len(self._choices):
            raise BookError(f"choice {span.choice} does not exist: the request has {len(self._choices)}")
        pages = self._choices[span.choice]
        if pages.finish_reason:
            self._compare(pages, span)
            return []
        if span.first_index > len(pages.token_ids):
            self._hold_back(pages, span)
            return []
        new = self._append(pages, span)
        return new if not pages.early else new + self._release_early(pages)

    def stop(self, choice: int, num_tokens: int) -> None:
        """A stop string ended `choice` after `num_tokens` tokens: later ones are dropped and not counted."""
        pages = self._choices[choice]
        del pages.token_ids[num_tokens:]
        pages.early.clear()
        pages.finish_reason = common_pb2.FINISH_REASON_STOP

    def drop_early(self) -> None:
        """Forget what waits behind gaps: another attempt will repeat it."""
        for pages in self._choices:
            pages.early.clear()

    def _append(self, pages: _ChoicePages, span: Span) -> list[Span]:
        num_known = len(pages.token_ids) - span.first_index
        if num_known > 0:
            self._compare(pages, span)
            if num_known > len(span.token_ids):
                return []
            logprobs = span.logprobs[num_known:]
            span = Span(span.choice, len(pages.token_ids), span.token_ids[num_known:], logprobs, span.finish_reason)
        if not span.token_ids and not span.finish_reason:
            return []
        pages.token_ids += span.token_ids
        pages.finish_reason = span.finish_reason
        return [span]

    def _compare(self, pages: _ChoicePages, span: Span) -> None:
        known = pages.token_ids[span.first_index : span.first_index + len(span.token_ids)]
        self.num_mismatches += sum(ours != theirs for ours, theirs in zip(known, span.token_ids, strict=False))

    def _hold_back(self, pages: _ChoicePages, span: Span) -> None:
        if sum(len(early.token_ids) for early in pages.early) + len(span.token_ids) > MAX_EARLY_TOKENS:
            raise BookError(f"index {len(pages.token_ids)} of choice {span.choice} is missing, later ones keep coming")
        pages.early.append(span)
        pages.early.sort(key=lambda early: early.first_index)

    def _release_early(self, pages: _ChoicePages) -> list[Span]:
        released: list[Span] = []
        while pages.early and not pages.finish_reason and pages.early[0].first_index <= len(pages.token_ids):
            released += self._append(pages, pages.early.pop(0))
        if pages.finish_reason:
            pages.early.clear()
        return released
