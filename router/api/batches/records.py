"""The records of files and batches: what their state files hold, and how clients see them."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Final, Literal

from pydantic import Field

from router.api.http.fields import JsonObject
from router.api.http.types import AnswerBody, Body, Text

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "expired", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")
FORMAT: Final = 1
"""Version of the state files. A router refuses those of another version by name."""


def new_id(prefix: str) -> str:
    """Return an id: ids sort by the time of their making."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(4)}"


class FileRecord(Body):
    """Hold what is known of a file. Times are Unix seconds."""

    format: Literal[1]
    id: str
    tenant: Text
    filename: Text
    purpose: Literal["batch", "batch_output"]
    bytes: int = Field(ge=0)
    created_at: int
    expires_at: int

    def view(self) -> JsonObject:
        """Return the file as clients see it."""
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at, "expires_at": self.expires_at,
            "filename": self.filename, "purpose": self.purpose, "status": "processed", "status_details": None,
        }  # fmt: skip


class LineProblem(Body):
    """Say what is wrong with a batch, or with a line of its input."""

    code: str
    message: Text
    line: int | None = None
    param: Text | None = None


class Counts(Body):
    """Count the lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Usage(Body):
    """Count the tokens of all lines that have run."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the sum."""
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.model_fields})

    def view(self) -> JsonObject:
        """Return the usage as clients see it."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class BatchRecord(Body):
    """Hold the state of a batch. Only the holder of the batch's lock writes it, after it has been created.

    `output_file_id` and `error_file_id` are chosen when the lines begin to run; clients see them at the end. `ending` is what the
    status will be once the results of all lines are recorded."""

    format: Literal[1]
    id: str
    tenant: Text
    endpoint: Text
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    files_expire_after_s: int = Field(ge=1)
    metadata: dict[str, str] | None = None
    errors: list[LineProblem] = Field(default_factory=list)
    counts: Counts = Counts()
    usage: Usage = Usage()
    output_file_id: str | None = None
    error_file_id: str | None = None
    ending: Ending | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether nothing about the batch will change any more."""
        return self.status in ENDED

    @property
    def ended_at(self) -> int | None:
        """Return when the batch ended; None while it has not."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at if self.has_ended else None

    def but(self, **changed: object) -> BatchRecord:
        """Return a copy with some fields changed."""
        return self.model_copy(update=changed)

    def view(self) -> JsonObject:
        """Return the batch as clients see it."""
        fields: tuple[str, ...] = ("id", "endpoint", "input_file_id", "completion_window", "status", "metadata")
        times = [name for name in BatchRecord.model_fields if name.endswith("_at")]
        problems = [{"line": None, "param": None, **problem.model_dump()} for problem in self.errors]
        return {
            "object": "batch",
            **{name: getattr(self, name) for name in (*fields, *times)},
            "errors": {"object": "list", "data": problems} if problems else None,
            "output_file_id": self.output_file_id if self.has_ended else None,
            "error_file_id": self.error_file_id if self.has_ended else None,
            "request_counts": self.counts.model_dump(),
            "usage": self.usage.view(),
        }


# As clients see them: types for OpenAPI, and for tests, which check every answer by them.

MIN_EXPIRE_S, MAX_EXPIRE_S = 3600, 30 * 24 * 3600
"""Seconds after which a file is deleted."""


class FileForm(Body):
    """The fields of an upload."""

    file: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/octet-stream"})]
    """The file: a part with a filename."""
    purpose: Literal["batch"]
    anchor: Literal["created_at"] = Field("created_at", alias="expires_after[anchor]")
    seconds: int = Field(MAX_EXPIRE_S, alias="expires_after[seconds]", ge=MIN_EXPIRE_S, le=MAX_EXPIRE_S)
    """After so many seconds the file is deleted."""


class FileObject(AnswerBody):
    """A file. Times are seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class DeletedFile(AnswerBody):
    """A file that is no more."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FilePage(AnswerBody):
    """A page of a list of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchProblem(AnswerBody):
    """What is wrong with a batch, or with a line of its input."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchProblems(AnswerBody):
    """All that is wrong with a batch."""

    object: Literal["list"]
    data: list[BatchProblem]


class BatchCounts(AnswerBody):
    """The lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchInputTokens(AnswerBody):
    """Where the tokens of prompts come from."""

    cached_tokens: int
    """Those that a prefix cache had."""


class BatchOutputTokens(AnswerBody):
    """What the tokens of outputs are for."""

    reasoning_tokens: int
    """Those of reasoning; they are part of output_tokens."""


class BatchUsage(AnswerBody):
    """The tokens of all lines that have run."""

    input_tokens: int
    input_tokens_details: BatchInputTokens
    output_tokens: int
    output_tokens_details: BatchOutputTokens
    total_tokens: int


class BatchObject(AnswerBody):
    """A batch. Times are seconds since 1970; null for what has not happened."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    errors: BatchProblems | None
    output_file_id: str | None
    """The file of the results; null until the batch has ended."""
    error_file_id: str | None
    """The file of what went wrong; null until the batch has ended."""
    request_counts: BatchCounts
    usage: BatchUsage


class BatchPage(AnswerBody):
    """A page of a list of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
