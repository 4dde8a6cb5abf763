"""One interface to all protocols: a case goes in, an answer or a MeshError comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from pdmesh.errors import error_from_rpc
from tests.soak.cases import Case


@dataclass
class ChoiceAnswer:
    """What came of one choice. `num_logprobs`: entries. `finish`: "stop", "length", "abort", or "" while it goes on."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    finish: str = ""


@dataclass
class Answer:
    """Everything that came. `has_text`, `has_tokens`: whether the protocol tells them; `left`: the client went before the end."""

    choices: list[ChoiceAnswer]
    has_text: bool = True
    has_tokens: bool = True
    has_logprobs: bool = True
    left: bool = False
    ended: bool = False  # as the protocol ends an answer: `completed`, [DONE], a final response, OK

    @property
    def num_pieces(self) -> int:
        """Tokens, or pieces of text where there are no tokens."""
        return sum(len(choice.tokens) for choice in self.choices)


class Side(Protocol):
    """A client of one protocol. Raises MeshError for what the mesh refuses or fails at, whatever the protocol says it with."""

    name: str

    async def ask(self, case: Case, *, timeout_s: float, leave_after: int | None = None) -> Answer:
        """`leave_after`: go once so many tokens have come. A task that is cancelled has its request cancelled."""

    def field_name(self, name: str) -> str:
        """How a refusal calls our field `name`."""

    async def close(self) -> None:
        """Closes the connections, whatever runs on them."""


MakeSide = Callable[[], Side]


def new_answer(case: Case, *, has_text: bool = True, has_tokens: bool = True, has_logprobs: bool = True) -> Answer:
    """An answer of which nothing has come."""
    choices = [ChoiceAnswer() for _ in range(case.num_choices)]
    return Answer(choices, has_text=has_text, has_tokens=has_tokens, has_logprobs=has_logprobs)


@contextmanager
def mesh_errors() -> Iterator[None]:
    """gRPC's errors as MeshError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
