"""The output of one choice of a chat as what it says: text, reasoning, and calls of tools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from pdmesh.text.detokenizer import ChoiceText, DetokenizerSource, VisibleMarks
from pdmesh.text.parsers.events import CallArguments, CallClosed, CallOpened, Content, Event, Thought, Unparsed
from pdmesh.text.parsers.machine import OutputParser
from pdmesh.text.stop_strings import StopResult
from pdmesh.v1 import mesh_pb2
from router.tokenization.prepared_request import OutputFormat

PartKind = Literal["text_chars", "reasoning_chars", "num_tool_calls"]
"""Fields of DeltaPart."""


class ReasoningTokens:
    """Count the tokens of one output with which the model thought. Usage and deltas have this one count.

    A token counts if any of its text stands in thoughts or in a mark around them. One without text of its own (a special token, a
    part of a character) counts as the character that comes next does. Thoughts that are cut off go on to the end of the output:
    whatever ended it counts as well, also where it is a stop string. It is a function of the tokens alone: a token whose text is
    held back counts once it is clear what that text is."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._open: deque[tuple[int, int]] = deque()  # characters, from and to, of tokens that are not settled
        self._num_taken = 0
        self.num = 0

    def add(self, begin: int, end: int) -> None:
        """Take the next token, by the characters of the output that it brought. Per-token path."""
        self._open.append((begin, max(end, begin + 1)))

    def settle(self, *, is_end: bool = False) -> None:
        """Count tokens about which the parser is certain; at the end of the output all. Per-token path."""
        num_settled = self._parser.num_settled
        while self._open and (is_end or self._open[0][1] <= num_settled):
            self.num += self._parser.is_thought(*self._open.popleft())

    def take_new(self) -> int:
        """Return how many were counted since the last call."""
        num_new, self._num_taken = self.num - self._num_taken, self.num
        return num_new


class ParsedText(ChoiceText):
    """Turn a choice's tokens into text that may be sent, as its base does, and collect the rest of the message for `fill`.

    The parser gets the text token by token, so what it finds is a function of the tokens alone, however they were grouped. Stop
    strings are looked for in all that the model writes, reasoning and calls included."""

    def __init__(
        self,
        tokenizer: DetokenizerSource,
        output_format: OutputFormat,
        call_id: Callable[[int], str],
        stop: Sequence[str] = (),
        silent_token_ids: Collection[int] = (),
    ) -> None:
        """`call_id` returns the id of a call by its index."""
        super().__init__(VisibleMarks(tokenizer, output_format.marks), stop, silent_token_ids)
        self._parser = output_format.parser()
        self._marks = output_format.marks
        self._seen: set[str] = set()
        self._call_id = call_id
        self._max_calls = output_format.max_calls
        self._keeps_text = output_format.is_constrained  # no mark stands in it but one that it spells
        self._ids: set[str] = set()
        self._num_whole = 0
        self._reasoning = ReasoningTokens(self._parser)
        self._pending = mesh_pb2.Delta()
        self._parts: list[tuple[PartKind, int]] = []  # kinds alternate

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of tokens with which the model thought, as far as that is certain; at the end it is."""
        return self._reasoning.num

    @property
    def has_called(self) -> bool:
        """Return whether the choice has a call that is complete."""
        return bool(self._num_whole)

    def push(self, token_id: int) -> StopResult:
        if token_id in self._marks:
            self._seen.add(self._marks[token_id])
        begin = self.num_chars
        piece, matched = super().push(token_id)
        self._reasoning.add(begin, self.num_chars)
        text = self._text_of(self._parser.feed(piece)) if piece else ""
        if matched is not None:
            return StopResult(text + self._rest(), matched)
        self._reasoning.settle()
        return StopResult(text, matched)

    def finish(self) -> str:
        piece = super().finish()
        return self._text_of(self._parser.feed(piece)) + self._rest()

    def _rest(self) -> str:
        text = self._text_of(self._parser.finish())
        self._reasoning.settle(is_end=True)
        return text

    def fill(self, delta: mesh_pb2.Delta) -> None:
        """Add to a delta what has come besides text since the last one, and in which order where that is not clear."""
        if len(self._parts) > 1:
            self._pending.parts.extend(mesh_pb2.DeltaPart(**{kind: size}) for kind, size in self._parts)
        self._pending.num_reasoning_tokens = self._reasoning.take_new()
        delta.MergeFrom(self._pending)
        self._pending.Clear()
        self._parts.clear()

    def _text_of(self, events: Iterable[Event]) -> str:
        """Return the text in events; collect the rest."""
        return "".join([self._take(event) for event in events])

    def _take(self, event: Event) -> str:
        match event:
            case Content(text):
                return self._shown(text)
            case Thought(text):
                thought = self._without_marks(text)
                self._pending.reasoning += thought
                self._note("reasoning_chars", len(thought))
            case CallOpened(index, name, call_id):
                self._open(index, name, call_id)
            case CallArguments(index, text) if self._takes(index):
                self._add_arguments(index, text)
            case CallClosed(index, is_whole) if self._takes(index):
                self._num_whole += is_whole
            case Unparsed(text, why):
                self._warn(why)
                return self._shown(text)
        return ""

    def _shown(self, text: str) -> str:
        text = text if self._keeps_text else self._without_marks(text)
        self._note("text_chars", len(text))
        return text

    def _note(self, kind: PartKind, size: int) -> None:
        """Note that so much of a kind comes next. Per-token path."""
        if self._parts and self._parts[-1][0] == kind:
            size += self._parts.pop()[1]
        if size:
            self._parts.append((kind, size))

    def _open(self, index: int, name: str, call_id: str) -> None:
        if not self._takes(index):
            self._warn(f"parallel_tool_calls is false: a further call, of {name[:80]}, was left out")
            return
        if not call_id or call_id in self._ids:
            call_id = self._call_id(index)
        self._ids.add(call_id)
        self._pending.tool_calls.add(index=index, id=call_id, name=name)
        self._note("num_tool_calls", 1)

    def _add_arguments(self, index: int, text: str) -> None:
        pieces = self._pending.tool_calls
        if not pieces or pieces[-1].index != index:
            pieces.add(index=index)
            self._note("num_tool_calls", 1)
        pieces[-1].arguments += text

    def _takes(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls

    def _warn(self, why: str) -> None:
        self._pending.warning = f"{self._pending.warning}; {why}" if self._pending.warning else why

    def _without_marks(self, text: str) -> str:
        """Return text without marks that came as special tokens, which are no text to anybody else; a spelled one stays."""
        for mark in self._seen:
            text = text.replace(mark, "")
        return text
