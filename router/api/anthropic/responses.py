"""From responses of `pdmesh.v1` to a message of Anthropic's API, whole or as its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdmesh.runtime.errors import MeshError
from pdmesh.v1 import common_pb2, mesh_pb2
from router.api.anthropic.content import Content
from router.api.anthropic.errors import told
from router.api.anthropic.requests import Call
from router.api.http.body import from_json
from router.api.http.fields import JsonObject

_STOP_REASONS = {
    common_pb2.FINISH_REASON_STOP: "end_turn",
    common_pb2.FINISH_REASON_LENGTH: "max_tokens",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}
PING = from_json({"type": "ping"}, "ping")
_NO_ROOM = "model_context_window_exceeded"


class Answer:
    """Build one message: the content grows with every delta; why it ended, and the usage, are known at the end."""

    def __init__(self, call: Call, request_id: str) -> None:
        self._call = call
        self._request_id = request_id
        self._started = mesh_pb2.Started()
        self._usage: mesh_pb2.Usage | None = None
        self._num_tokens = 0
        self._content = Content(hides_thoughts=call.hides_thoughts)
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def add(self, number: int, response: mesh_pb2.GenerateResponse) -> None:
        """Take in a message, for a whole body."""
        for _ in self._shown(response):
            pass

    def body(self) -> JsonObject:
        """Return the whole message."""
        return {**self._head(), "content": self._content.blocks(), **self._end(), "usage": self._usage_shown()}

    def events(self, number: int, response: mesh_pb2.GenerateResponse) -> Iterable[bytes]:
        """Return the events that show `response`."""
        return map(_event, self._shown(response))

    def last_events(self) -> Iterable[bytes]:
        """Return the events that end a stream: the counts of `message_delta` replace those of `message_start`."""
        yield from map(_event, self._content.end())
        yield _event({"type": "message_delta", "delta": self._end(), "usage": self._usage_shown()})
        yield _event({"type": "message_stop"})

    def error_event(self, error: MeshError) -> bytes:
        """Return the event that ends a stream with an error."""
        return from_json(told(error, self._request_id).body, "error")

    def _shown(self, response: mesh_pb2.GenerateResponse) -> Iterator[JsonObject]:
        """Take in a message while its events are read."""
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
                message = {**self._head(), "content": [], **self._end(), "usage": self._usage_shown()}
                yield {"type": "message_start", "message": message}
            case "delta":
                self._num_tokens += len(response.delta.token_ids)
                yield from self._content.add(response.delta)
                self._note_end(response.delta)
            case "completed":
                self._usage = response.completed.usage

    def _note_end(self, delta: mesh_pb2.Delta) -> None:
        """Note why the output has ended. A stop string counts unless the message has calls to make; an output that is shorter
        than it might be has filled the context."""
        if not delta.finish_reason:
            return
        self._stop_reason = _STOP_REASONS[delta.finish_reason]
        if self._stop_reason == "end_turn" and delta.stop_reason in self._call.stop_sequences:
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        if self._stop_reason == "max_tokens" and self._num_tokens < self._call.request.sampling.max_tokens:
            self._stop_reason = _NO_ROOM

    def _head(self) -> JsonObject:
        return {"id": f"msg_{self._request_id}", "type": "message", "role": "assistant", "model": self._started.model}

    def _end(self) -> JsonObject:
        return {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}

    def _usage_shown(self) -> JsonObject:
        """Return the counts so far. What a prefix cache served is known at the end; nothing is charged for filling one."""
        num_cached = self._usage.cached_tokens if self._usage else 0
        return {
            "input_tokens": self._started.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._usage.completion_tokens if self._usage else self._num_tokens,
        }


def _event(shown: JsonObject) -> bytes:
    return from_json(shown, str(shown["type"]))
