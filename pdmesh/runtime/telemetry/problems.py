"""How a request ended, in words that a span may hold: nothing of the request's text."""

from __future__ import annotations

import asyncio

from pdmesh.runtime.errors import Cancelled, InvalidArgument, MeshError, NotFound
from pdmesh.v1 import common_pb2


def problem_of(error: BaseException) -> tuple[str, str]:
    """`error.type` and what to tell people. Of what a caller has got wrong only the field is named: messages quote it. Of errors
    that are none of ours nothing but the kind is known to be harmless."""
    if isinstance(error, (GeneratorExit, asyncio.CancelledError)):
        return Cancelled.default_code.name, "the caller left"
    if not isinstance(error, MeshError):
        return type(error).__name__, ""
    if isinstance(error, (InvalidArgument, NotFound)):
        return error.code.name, error.field or ""
    return error.code.name, error.message


def finish_word(reason: common_pb2.FinishReason.ValueType) -> str:
    """Why a choice ended, as the GenAI conventions write it."""
    if reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        return "unfinished"
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def is_departure(error_type: str) -> bool:
    """Whoever leaves has made no error."""
    return error_type == Cancelled.default_code.name
