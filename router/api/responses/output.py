"""From the deltas of a chat to the output items of a response, and to the events that show how they grow.

    reasoning   output_item.added, content_part.added, reasoning_text.delta …, .done, content_part.done, output_item.done
    message     output_item.added, content_part.added, output_text.delta …, .done, content_part.done, output_item.done
    call        output_item.added, function_call_arguments.delta …, .done, output_item.done

One item is open at a time: what another item says closes it. Whole responses are made by the same code, which then drops the
events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.http.fields import JsonObject
from router.api.http.reports import in_order

Event = JsonObject
"""An event without its sequence number."""

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class ShowLogprobs(Protocol):
    """Shows the log-probabilities of tokens."""

    def __call__(self, entries: Sequence[common_pb2.Logprobs]) -> list[JsonObject]:
        """Return an object for each entry."""


class _Item(Protocol):
    """An output item that grows. Its events come without the item's id and index."""

    id: str

    def shown(self, status: str) -> JsonObject:
        """Return the item as far as it has come."""

    def opened(self) -> Iterator[Event]:
        """Yield what follows the event that adds the item."""

    def closed(self) -> Iterator[Event]:
        """Yield what goes before the event that ends the item."""


class _ReasoningItem:
    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._pieces: list[str] = []

    def _part(self) -> JsonObject:
        return {"type": "reasoning_text", "text": "".join(self._pieces)}

    def shown(self, status: str) -> JsonObject:
        content = [self._part()] if self._pieces else []
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": None,
            "status": status,
        }

    def opened(self) -> Iterator[Event]:
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def add(self, text: str) -> Event:
        self._pieces.append(text)
        return {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def closed(self) -> Iterator[Event]:
        yield {"type": "response.reasoning_text.done", "content_index": 0, "text": self._part()["text"]}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part()}


class _MessageItem:
    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._pieces: list[str] = []
        self._logprobs: list[JsonObject] = []
        self._is_open = False

    def _part(self) -> JsonObject:
        return {"type": "output_text", "text": "".join(self._pieces), "annotations": [], "logprobs": list(self._logprobs)}

    def shown(self, status: str) -> JsonObject:
        content = [self._part()] if self._is_open else []
        return {"id": self.id, "type": "message", "role": "assistant", "content": content, "status": status}

    def opened(self) -> Iterator[Event]:
        self._is_open = True
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def add(self, text: str, logprobs: list[JsonObject]) -> Event:
        self._pieces.append(text)
        self._logprobs += logprobs
        return {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": logprobs}

    def add_logprobs(self, logprobs: list[JsonObject]) -> None:
        """Add those of tokens behind the text, such as the one that ended it."""
        self._logprobs += logprobs

    def closed(self) -> Iterator[Event]:
        part = self._part()
        yield {"type": "response.output_text.done", "content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.content_part.done", "content_index": 0, "part": part}


class _CallItem:
    def __init__(self, item_id: str, piece: mesh_pb2.ToolCallDelta, namespaced: tuple[str, str] | None) -> None:
        """`namespaced`: namespace and name of the function, where it is in one."""
        self.id = item_id
        self._call_id = piece.id
        namespace, self._name = namespaced or ("", piece.name)
        self._namespace: JsonObject = {"namespace": namespace} if namespace else {}
        self._pieces: list[str] = []

    def shown(self, status: str) -> JsonObject:
        arguments = "".join(self._pieces)
        said: JsonObject = {"call_id": self._call_id, "name": self._name, **self._namespace, "arguments": arguments}
        if status == COMPLETED and not _is_json(arguments):  # cut off, or not written as a call: text follows
            status = INCOMPLETE
        return {"id": self.id, "type": "function_call", **said, "status": status}

    def opened(self) -> Iterator[Event]:
        return iter(())

    def add(self, text: str) -> Event:
        self._pieces.append(text)
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def closed(self) -> Iterator[Event]:
        arguments = "".join(self._pieces)
        yield {"type": "response.function_call_arguments.done", "name": self._name, "arguments": arguments}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _num_tokens(entries: Sequence[JsonObject], num_chars: int) -> int:
    """Return how many of the first tokens it takes to write so many characters. Pure."""
    sizes = accumulate((len(str(entry["token"])) for entry in entries), initial=0)
    return next((number for number, size in enumerate(sizes) if size >= num_chars), len(entries))


class Output:
    """Builds the output of one response. The ids of its items are made of `suffix`, so that a kept item is found by its id.
    `namespaces`: namespace and name of functions that are in one, by the names that the model writes."""

    def __init__(self, suffix: str, show_logprobs: ShowLogprobs, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._suffix = suffix
        self._namespaces = namespaces
        self._show_logprobs = show_logprobs
        self._done: list[JsonObject] = []
        self._open: _Item | None = None
        self._logprobs: list[JsonObject] = []  # of tokens whose text has not come yet
        self._num_calls = 0

    def items(self) -> list[JsonObject]:
        """Return all items; one that is open is incomplete."""
        return [*self._done, *([] if self._open is None else [self._open.shown(INCOMPLETE)])]

    def take(self, delta: mesh_pb2.Delta) -> Iterator[Event]:
        """Yield the events of a delta."""
        if delta.logprobs and not self._num_calls:
            self._logprobs += self._show_logprobs(delta.logprobs)
        behind = self._without_reasoning(delta) if delta.logprobs else []
        for said in in_order(delta):
            yield from self._take_reasoning(said.reasoning)
            yield from self._take_text(said.text)
            for piece in said.calls:
                yield from self._take_call(piece)
            if not self._num_calls:
                self._logprobs += behind
            behind = []

    def _without_reasoning(self, delta: mesh_pb2.Delta) -> list[JsonObject]:
        """Drop the log-probabilities of reasoning; keep those of text before it in the delta, and return those behind it."""
        num_chars = delta.parts[0].text_chars if delta.parts else 0
        place = _num_tokens(self._logprobs, num_chars) if delta.num_reasoning_tokens else 0
        behind = self._logprobs[place + delta.num_reasoning_tokens :]
        del self._logprobs[place:]
        if not place:
            self._logprobs, behind = behind, []
        return behind

    def end(self, *, is_complete: bool) -> Iterator[Event]:
        """Yield the events that end the output. It has a message, be it empty, unless it has calls or was cut off before one."""
        if isinstance(self._open, _MessageItem):
            self._open.add_logprobs(self._logprobs)
        is_empty = self._open is None and not self._done
        if is_empty or (is_complete and not self._num_calls and isinstance(self._open, _ReasoningItem)):
            yield from self._message()[1]
        yield from self._close(COMPLETED if is_complete else INCOMPLETE)

    def _take_reasoning(self, text: str) -> Iterator[Event]:
        if text:
            reasoning, events = self._reasoning()
            yield from events
            yield self._of(reasoning, reasoning.add(text))

    def _take_text(self, text: str) -> Iterator[Event]:
        if not text:
            return
        message, events = self._message()
        yield from events
        logprobs, self._logprobs = self._logprobs, []
        yield self._of(message, message.add(text, logprobs))

    def _take_call(self, piece: mesh_pb2.ToolCallDelta) -> Iterator[Event]:
        if piece.name:
            call = _CallItem(f"fc_{self._next_suffix()}", piece, self._namespaces.get(piece.name))
            self._num_calls += 1
            self._logprobs = []
            yield from self._begin(call)
        assert isinstance(self._open, _CallItem)  # a call's pieces come without anything between them
        if piece.arguments:
            yield self._of(self._open, self._open.add(piece.arguments))

    def _reasoning(self) -> tuple[_ReasoningItem, Iterator[Event]]:
        if isinstance(self._open, _ReasoningItem):
            return self._open, iter(())
        item = _ReasoningItem(f"rs_{self._next_suffix()}")
        return item, self._begin(item)

    def _message(self) -> tuple[_MessageItem, Iterator[Event]]:
        if isinstance(self._open, _MessageItem):
            return self._open, iter(())
        item = _MessageItem(f"msg_{self._next_suffix()}")
        return item, self._begin(item)

    def _next_suffix(self) -> str:
        return f"{self._suffix}_{len(self._done) + (self._open is not None)}"

    def _begin(self, item: _Item) -> Iterator[Event]:
        yield from self._close(COMPLETED)
        self._open = item
        yield {"type": "response.output_item.added", "output_index": len(self._done), "item": item.shown(IN_PROGRESS)}
        for event in item.opened():
            yield self._of(item, event)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        for event in self._open.closed():
            yield self._of(self._open, event)
        shown = self._open.shown(status)
        yield {"type": "response.output_item.done", "output_index": len(self._done), "item": shown}
        self._done.append(shown)
        self._open = None

    def _of(self, item: _Item, event: Event) -> Event:
        return {**event, "item_id": item.id, "output_index": len(self._done)}
