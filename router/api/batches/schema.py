"""Files and batches as clients see them, as types: for OpenAPI, and for tests, which check every answer by them. They are formed
by `records.py` and `handlers.py`, as plain objects."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.api.batches.records import Status
from router.api.http.types import AnswerBody, Body

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
