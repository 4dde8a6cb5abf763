"""The output of one choice of a chat as what it says: text, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from pdmesh.text.detokenizer import ChoiceText, DetokenizerSource, VisibleMarks
from pdmesh.text.parsers.events import CallArguments, CallClosed, CallOpened, Content, Event, Thought, Unparsed
from pdmesh.text.stop_strings import StopResult
from pdmesh.v1 import mesh_pb2
from router.tokenization.prepared_request import OutputFormat

PartKind = Literal["text_chars", "reasoning_chars", "num_tool_calls"]
"""Fields of DeltaPart."""


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
        self._ids: set[str] = set()
        self._num_whole = 0
        self.num_reasoning_tokens = 0
        self._pending = mesh_pb2.Delta()
        self._num_unread = 0  # tokens since the last event
        self._parts: list[tuple[PartKind, int]] = []  # kinds alternate

    @property
    def has_called(self) -> bool:
        """Return whether the choice has a call that is complete."""
        return bool(self._num_whole)

    def push(self, token_id: int) -> StopResult:
        if token_id in self._marks:
            self._seen.add(self._marks[token_id])
        self._num_unread += 1
        piece, matched = super().push(token_id)
        was_thinking, num_thought = self._parser.is_thinking, len(self._pending.reasoning)
        text = self._text_of(self._parser.feed(piece)) if piece else ""
        is_thought = was_thinking or self._parser.is_thinking or len(self._pending.reasoning) > num_thought
        self.num_reasoning_tokens += is_thought
        if matched is not None:
            text += self._text_of(self._parser.finish())
        return StopResult(text, matched)

    def finish(self) -> str:
        piece = super().finish()
        return self._text_of(self._parser.feed(piece)) + self._text_of(self._parser.finish())

    def fill(self, delta: mesh_pb2.Delta) -> None:
        """Add to a delta what has come besides text since the last one, and in which order where that is not clear."""
        if len(self._parts) > 1:
            self._pending.parts.extend(mesh_pb2.DeltaPart(**{kind: size}) for kind, size in self._parts)
        delta.MergeFrom(self._pending)
        self._pending.Clear()
        self._parts.clear()

    def _text_of(self, events: Iterable[Event]) -> str:
        """Return the text in events; collect the rest."""
        pieces = []
        for event in events:
            pieces.append(self._take(event))
            if isinstance(event, Thought):
                self._pending.num_reasoning_tokens += self._num_unread
            self._num_unread = 0
        return "".join(pieces)

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
        text = self._without_marks(text)
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
