"""The form of a case, and what a test sees of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdmesh.text.grammar import GrammarCompiler
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.v1 import common_pb2
from tests.support.tiny_models import IM_END, VOCAB_SIZE

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
ORIGIN = "https://chat.example"


@dataclass(frozen=True)
class Seen:
    """An answer, and what the worker was asked for because of it."""

    status: int
    headers: Mapping[str, str]
    text: str
    request: common_pb2.TokenRequest
    num_submits: int
    tokenizer: Tokenizer

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.request.prompt_token_ids, skip_special_tokens=False)

    @property
    def sampling(self) -> common_pb2.SamplingParams:
        return self.request.sampling

    def allows(self, text: str) -> bool:
        """Whether a model that is held to the request's schema may write this and end."""
        compiler = GrammarCompiler(self.tokenizer.to_json(), VOCAB_SIZE, {IM_END})
        matcher = compiler.compile("json_schema", self.sampling.constraint.json_schema).matcher()
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if matcher.num_possible(token_ids) < len(token_ids):
            return False
        for token_id in token_ids:
            matcher.take(token_id)
        return bool(matcher.allowed()[IM_END // 32] >> IM_END % 32 & 1)

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def choice(self) -> Any:
        return self.body["choices"][0]

    @property
    def message(self) -> Any:
        return self.choice["message"]

    @property
    def lines(self) -> list[str]:
        """The data of each event."""
        return [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]

    @property
    def events(self) -> list[Any]:
        return [json.loads(line) for line in self.lines if line != "[DONE]"]

    @property
    def pieces(self) -> list[Any]:
        """The choices of all chunks."""
        return [choice for event in self.events for choice in event["choices"]]

    @property
    def calls(self) -> list[Any]:
        """The pieces of tool calls of all chunks."""
        return [call for piece in self.pieces for call in piece["delta"].get("tool_calls") or []]


@dataclass(frozen=True)
class Case:
    """One request, what is looked at in its answer, and the right value of that."""

    name: str
    about: str
    source: str  # where such a thing was reported
    body: dict[str, Any]
    find: Callable[[Seen], object]
    right: object
    path: str = CHAT
    says: str = ""  # what the model writes; empty: letters until max_tokens
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"


def refusal(seen: Seen) -> object:
    """Status, field and code of an error, and that no worker has heard of the request."""
    error = seen.body["error"]
    return seen.status, error["param"], error["code"], seen.num_submits


def refused(param: str, code: str | None = None, status: int = 400) -> object:
    """What `refusal` finds where the field is named."""
    return status, param, code, 0
