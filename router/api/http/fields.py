"""JSON objects of requests, and what errors say of their fields."""

from __future__ import annotations

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.text import exact_json
from router.api.validation import refuse

JsonObject = dict[str, object]
MAX_UINT32 = 2**32 - 1
MAX_SHOWN_CHARS = 60


class UnknownName(InvalidArgument):
    """Report an unknown field, whose name is the caller's own text."""


def dumped(value: object) -> str:
    """Return a value as JSON text. Raises ValueError where it cannot be sent as such."""
    try:
        text = exact_json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        raise ValueError("is not valid Unicode, not a JSON number, or nested too deeply") from None
    return text


def json_text(param: str, value: object) -> str:
    """Return `value` as JSON text. Raises InvalidArgument."""
    try:
        return dumped(value)
    except ValueError as error:
        refuse(param, str(error))


def shown(value: object) -> str:
    """Return a value for an error message: short, and never a whole object, array or long number."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of many digits"
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
