"""The lines of a batch's input file: each is one request, in JSON, with a custom_id that its result repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.text.exact_json import dumps
from router.api.batches.records import LineProblem
from router.api.http.body import parse_json
from router.api.http.errors import HttpError
from router.api.http.types import Body, Text, checked

MAX_ID_CHARS = 512
MAX_PROBLEMS = 100
ENVELOPE_BYTES = 8 << 10
"""What a line may have besides the body of its request."""


class _LineBody(Body):
    """A line as the client wrote it."""

    custom_id: Text = Field(min_length=1, max_length=MAX_ID_CHARS)
    method: Literal["POST"]
    url: Text
    body: dict[str, Any]


@dataclass(frozen=True)
class Line:
    """Hold one request. `body` is JSON."""

    number: int
    custom_id: str
    body: bytes


class LineError(Exception):
    """Report a line that cannot be used."""

    def __init__(self, problem: LineProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True)
class LineLimits:
    """Bound an input file: bytes of a request's body, and number of lines."""

    max_body_bytes: int
    max_lines: int


def raw_lines(path: Path, max_body_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers from 1. Raises LineError for one that is too long, OSError."""
    most = max_body_bytes + ENVELOPE_BYTES
    with open(path, "rb") as file:
        number = 0
        while raw := file.readline(most + 1):
            number += 1
            if len(raw) > most:
                problem = f"line {number} has more than {most} bytes (http_max_body_bytes, and {ENVELOPE_BYTES} for the rest)"
                raise LineError(LineProblem(code="line_too_long", message=problem, line=number))
            if raw.strip():
                yield number, raw


def parse_line(number: int, raw: bytes, endpoint: str) -> Line:
    """Return the request in a line. Raises LineError that names the field."""
    try:
        wanted = checked(_LineBody, parse_json(raw.removeprefix(b"\xef\xbb\xbf"), f"line {number}"))
    except HttpError as error:
        raise LineError(LineProblem(code="invalid_json_line", message=error.message, line=number)) from None
    except InvalidArgument as error:
        raise _wrong(number, error.field or "", error.message) from None
    if wanted.url != endpoint:
        raise _wrong(
            number, "url", f"url: {wanted.url[:80]!r} is not the endpoint of the batch, {endpoint}", "mismatched_endpoint"
        )
    if wanted.body.get("stream"):
        raise _wrong(number, "body.stream", "body.stream: the result of a line is a whole body; leave it out")
    return Line(number, wanted.custom_id, dumps(wanted.body, separators=(",", ":")).encode())


def _wrong(number: int, param: str, message: str, code: str = "invalid_request") -> LineError:
    return LineError(LineProblem(code=code, message=message, line=number, param=param))


def lines_of(path: Path, endpoint: str, max_body_bytes: int) -> Iterator[Line]:
    """Yield the requests of a file that has been checked. Raises LineError, OSError."""
    for number, raw in raw_lines(path, max_body_bytes):
        yield parse_line(number, raw, endpoint)


def check_input(path: Path, endpoint: str, limits: LineLimits) -> tuple[int, list[LineProblem]]:
    """Return the number of lines, and what is wrong with them: the first MAX_PROBLEMS. Raises OSError."""
    problems: list[LineProblem] = []
    seen: dict[str, int] = {}
    total = 0
    try:
        for number, raw in raw_lines(path, limits.max_body_bytes):
            total += 1
            if total > limits.max_lines:
                problems.append(_too_many(limits.max_lines))
                break
            try:
                _note(seen, parse_line(number, raw, endpoint))
            except LineError as error:
                problems.append(error.problem)
            if len(problems) >= MAX_PROBLEMS:
                break
    except LineError as error:
        problems.append(error.problem)
    if not total and not problems:
        problems.append(LineProblem(code="empty_file", message="the input file has no lines; send one request a line"))
    return total, problems


def _note(seen: dict[str, int], line: Line) -> None:
    first = seen.setdefault(line.custom_id, line.number)
    if first != line.number:
        message = f"custom_id: {line.custom_id[:80]!r} is that of line {first}, too; give each line its own"
        raise _wrong(line.number, "custom_id", message, "duplicate_custom_id")


def _too_many(max_lines: int) -> LineProblem:
    message = f"the input file has more than {max_lines} lines (http_batch_lines); make several batches of it"
    return LineProblem(code="too_many_lines", message=message)
