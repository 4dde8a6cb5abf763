"""The form of a case, and what a test sees of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdmesh.v1 import common_pb2

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
    prompt: str
    sampling: common_pb2.SamplingParams
    num_submits: int

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
