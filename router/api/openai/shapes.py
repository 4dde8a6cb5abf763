"""How a choice looks in the two kinds of answer: chat completions and (text) completions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pdmesh.v1 import common_pb2
from router.api.openai.fields import JsonObject

Entries = Sequence[common_pb2.Logprobs]
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own bound."""


class Shape(Protocol):
    """`text_offset`: characters of the choice's text before these entries, echo included."""

    @property
    def id_prefix(self) -> str:
        """Of the answer's id."""

    @property
    def object_name(self) -> str:
        """Of a whole answer."""

    @property
    def chunk_name(self) -> str:
        """Of a streamed piece."""

    def whole(self, text: str, logprobs: JsonObject | None) -> JsonObject:
        """What a complete choice has besides index and finish reason."""

    def piece(self, text: str, logprobs: JsonObject | None, *, first: bool) -> JsonObject:
        """What a streamed piece has; `first` of its choice."""

    def logprobs(self, entries: Entries, text_offset: int) -> JsonObject:
        """Log-probabilities of some tokens in a row."""


class ChatShape:
    """`chat.completion`: messages."""

    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str, logprobs: JsonObject | None) -> JsonObject:
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}

    def piece(self, text: str, logprobs: JsonObject | None, *, first: bool) -> JsonObject:
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, entries: Entries, text_offset: int) -> JsonObject:
        content = [{**_token(entry.chosen), "top_logprobs": [_token(top) for top in entry.top]} for entry in entries]
        return {"content": content, "refusal": None}


class TextShape:
    """`text_completion`: plain text."""

    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def whole(self, text: str, logprobs: JsonObject | None) -> JsonObject:
        return {"text": text, "logprobs": logprobs}

    def piece(self, text: str, logprobs: JsonObject | None, *, first: bool) -> JsonObject:
        return self.whole(text, logprobs)

    def logprobs(self, entries: Entries, text_offset: int) -> JsonObject:
        tokens = [entry.chosen.text for entry in entries]
        offsets = [text_offset + sum(map(len, tokens[:number])) for number in range(len(tokens))]
        tops = [_alternatives(entry) for entry in entries] if any(entry.top for entry in entries) else None
        values = [_value(entry.chosen) for entry in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _token(token: common_pb2.TokenLogprob) -> JsonObject:
    """`bytes` is null where the token alone is no text: U+FFFD stands for its bytes then."""
    encoded = None if "\ufffd" in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": _value(token), "bytes": encoded}


def _alternatives(entry: common_pb2.Logprobs) -> dict[str, float]:
    """The chosen token is among them, as with OpenAI, be it likely or not. Of two that read alike the likelier stays."""
    tokens: Iterable[common_pb2.TokenLogprob] = (entry.chosen, *reversed(entry.top))
    return {token.text: _value(token) for token in tokens}


def _value(token: common_pb2.TokenLogprob) -> float:
    return token.logprob if token.logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB
