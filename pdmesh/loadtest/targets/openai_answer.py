"""What an OpenAI server sends, checked: bytes in, values out, or a TargetError that says what is wrong. Pure.

Whatever comes is one request's error: it must not end the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdmesh.loadtest.record import Outcome
from pdmesh.loadtest.targets.target import Done, TargetError, TargetInfo

_REFUSALS = (429, 503)
_MAX_COUNT = 1 << 40
_MAX_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream: the text of its first choice, reasoning included, and the counts if it brings them."""

    text: str
    done: Done | None


def malformed(what: str) -> TargetError:
    """The error for an answer that is none."""
    return TargetError(Outcome.ERROR, f"malformed answer: {what}")


def read_chunk(data: bytes) -> Chunk:
    """The data of one event."""
    value = _object(data)
    if value.get("error"):
        raise TargetError(Outcome.ERROR, read_message(data))
    usage = _member(value, "usage", dict, "an object")
    return Chunk(_text(value), _done(usage) if usage else None)


def read_models(body: bytes) -> dict[str, TargetInfo]:
    """What /models lists, with the context where the server tells it."""
    found = {}
    for model in _member(_object(body), "data", list, "a list") or []:
        if isinstance(model, dict) and isinstance(name := model.get("id"), str):
            context = model.get("max_model_len")
            found[name] = TargetInfo(name, context if isinstance(context, int) and context > 0 else None)
    return found


def read_refusal(status: int, body: bytes) -> TargetError:
    """The error for an answer that is not 200."""
    outcome = Outcome.REFUSED if status in _REFUSALS else Outcome.ERROR
    return TargetError(outcome, f"HTTP {status}: {read_message(body)}")


def read_message(body: bytes) -> str:
    """What the server says was wrong, in one line of at most 200 characters that a terminal can show."""
    try:
        value = json.loads(body)
        error = value.get("error", value)
        text = error.get("message", "") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = body[: 4 * _MAX_MESSAGE].decode(errors="replace")
    line = " ".join(str(text).split())[:_MAX_MESSAGE]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def _text(value: Mapping[str, Any]) -> str:
    choices = _member(value, "choices", list, "a list")
    if not choices:
        return ""
    choice = choices[0]
    if not isinstance(choice, dict):
        raise malformed("choices[0] is not an object")
    delta = _member(choice, "delta", dict, "an object", "choices[0].")
    if delta is None:
        return _member(choice, "text", str, "a text", "choices[0].") or ""
    pieces = (_member(delta, name, str, "a text", "choices[0].delta.") for name in ("content", "reasoning_content"))
    return next((piece for piece in pieces if piece), "")


def _done(usage: Mapping[str, Any]) -> Done:
    details = _member(usage, "prompt_tokens_details", dict, "an object", "usage.") or {}
    cached = _count(details, "cached_tokens", "usage.prompt_tokens_details.")
    return Done(_count(usage, "prompt_tokens", "usage."), _count(usage, "completion_tokens", "usage."), cached or 0)


def _count(value: Mapping[str, Any], name: str, where: str) -> int | None:
    found = value.get(name)
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < _MAX_COUNT:
        raise malformed(f"{where}{name} is not a count")
    return found


def _member(value: Mapping[str, Any], name: str, kind: type, called: str, where: str = "") -> Any:
    """What stands under `name`, of this kind; None where it is absent or null."""
    found = value.get(name)
    if found is not None and not isinstance(found, kind):
        raise malformed(f"{where}{name} is not {called}")
    return found


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise malformed("not a JSON object")
    return value
