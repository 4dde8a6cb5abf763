"""Checks every answer of a router by the type that its endpoint declares, after the test that received it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.http.openapi import Endpoint, Operation


@dataclass(frozen=True)
class Answer:
    """What was sent to a client."""

    path: str
    operation: Operation
    status: int
    kind: bytes
    sent: bytes


class RecordedAnswers:
    """Wraps the application of a router. The checks come later: they take time, which tests of slow clients measure."""

    answers: ClassVar[list[Answer]] = []

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self._operation_of(scope) if scope["type"] == "http" else None
        head: dict[str, Any] = {}
        sent = bytearray()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            sent.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if operation is not None and head:
                kind = dict(head["headers"]).get(b"content-type", b"").partition(b";")[0]
                self.answers.append(Answer(str(scope["path"]), operation, head["status"], kind, bytes(sent)))

    def _operation_of(self, scope: Scope) -> Operation | None:
        found = (route for route in self._routes if route.matches(scope)[0] is Match.FULL)
        route = next(found, None)
        return route.operation if isinstance(route, Endpoint) else None


def problems(answers: Iterable[Answer]) -> Iterator[str]:
    """Yield what is wrong with answers."""
    for answer in answers:
        for form, body in _bodies(answer):
            try:
                TypeAdapter(form).validate_python(json.loads(body))
            except (ValidationError, ValueError) as error:
                yield f"{answer.path}: {error} in {body[:500]!r}"


def _bodies(answer: Answer) -> Iterator[tuple[Any, bytes]]:
    """Yield each JSON object of an answer, with its type."""
    operation = answer.operation
    if answer.kind == b"text/event-stream" and operation.event is not None:
        whole = answer.sent.rpartition(b"\n\n")[0]  # a client may have left in the middle of an event
        for line in whole.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield operation.event, line.removeprefix(b"data: ")
    elif answer.kind == b"application/json":
        is_error = answer.status >= 400 and operation.error is not None
        yield operation.error if is_error else operation.answer, answer.sent
