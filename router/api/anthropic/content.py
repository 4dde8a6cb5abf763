"""The content of an answer as it comes: blocks of thinking, text and calls, and the events that show them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic_core import from_json

from pdmesh.v1 import mesh_pb2
from router.api.http.fields import JsonObject
from router.api.http.reports import in_order

_OUR_ID = re.compile(r"\Acall_([0-9a-f]{24})\Z")
"""An id that the router made, in OpenAI's form; one that the model wrote is kept, because its template may need it."""


@dataclass
class _Block:
    """Hold a block as far as it has come. `head`: its fields as they are when it begins; `grows`: the one that pieces make up."""

    head: JsonObject
    grows: str
    pieces: list[str] = field(default_factory=list)

    def shown(self) -> JsonObject:
        """Return the whole block."""
        text = "".join(self.pieces)
        return {**self.head, self.grows: input_of(text) if self.grows == "input" else text}


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "input": ("input_json_delta", "partial_json"),
}
"""The type of the event that brings a piece, and its field, by the field that grows."""


class Content:
    """Collect the blocks of one answer. Whole answers and events are made of the same blocks, so both hold the same.

    Blocks follow each other: one ends when another begins.
    """

    def __init__(self, *, hides_thoughts: bool) -> None:
        """`hides_thoughts`: blocks of thinking stay empty."""
        self._hides_thoughts = hides_thoughts
        self._blocks: list[_Block] = []
        self._open: _Block | None = None

    def blocks(self) -> list[JsonObject]:
        """Return the blocks, each whole."""
        return [block.shown() for block in self._blocks]

    def add(self, delta: mesh_pb2.Delta) -> Iterator[JsonObject]:
        """Take in a delta while its events are read."""
        for said in in_order(delta):
            yield from self._think(said.reasoning)
            yield from self._say(said.text)
            for piece in said.calls:
                yield from self._add_call(piece)

    def end(self) -> Iterator[JsonObject]:
        """Yield the events that end the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return
        if block.grows == "thinking":
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""})
        yield self._event("content_block_stop")

    def _think(self, piece: str) -> Iterator[JsonObject]:
        if piece and not self._is_open("thinking"):
            yield from self._begin(_Block({"type": "thinking", "thinking": "", "signature": ""}, "thinking"))
        yield from self._grow("" if self._hides_thoughts else piece)

    def _say(self, piece: str) -> Iterator[JsonObject]:
        if piece and not self._is_open("text"):
            yield from self._begin(_Block({"type": "text", "text": ""}, "text"))
        yield from self._grow(piece)

    def _is_open(self, grows: str) -> bool:
        return self._open is not None and self._open.grows == grows

    def _begin(self, block: _Block) -> Iterator[JsonObject]:
        yield from self.end()
        self._blocks.append(block)
        self._open = block
        yield self._event("content_block_start", content_block=block.head)

    def _grow(self, piece: str) -> Iterator[JsonObject]:
        if not piece or self._open is None:
            return
        self._open.pieces.append(piece)
        kind, name = _DELTAS[self._open.grows]
        yield self._event("content_block_delta", delta={"type": kind, name: piece})

    def _add_call(self, piece: mesh_pb2.ToolCallDelta) -> Iterator[JsonObject]:
        if piece.name:
            head: JsonObject = {"type": "tool_use", "id": _OUR_ID.sub(r"toolu_\1", piece.id), "name": piece.name, "input": {}}
            yield from self._begin(_Block(head, "input"))
        yield from self._grow(piece.arguments)

    def _event(self, kind: str, **more: object) -> JsonObject:
        return {"type": kind, "index": len(self._blocks) - 1, **more}


def input_of(text: str) -> object:
    """Return the arguments of a call as an object. Of a call that was cut off these are the members that had come, without a
    string that had not ended: what Anthropic's own clients make of the same pieces."""
    try:
        value = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        value = _lenient(text)
    return _finite(value) if isinstance(value, dict) else {}


def _lenient(text: str) -> object:
    """Return JSON that holds half of a surrogate pair, which Python alone reads; None for text that is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _finite(value: object) -> object:
    """Return a value without infinities, which JSON text such as 1e999 becomes, and which JSON has not."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(1.7976931348623157e308, value)
    return value
