"""Typed access to one JSON object of a request. Every error names the field, and a name that no reader asked for is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping

from pdmesh.runtime.errors import InvalidArgument
from router.api.validation import refuse

JsonObject = dict[str, object]
MAX_UINT32 = 2**32 - 1
MAX_SHOWN_CHARS = 60


class UnknownName(InvalidArgument):
    """Report an unknown field, whose name is the caller's own text."""


class Fields:
    """Read fields by name. Readers return None for what is absent or null, and raise InvalidArgument for a wrong type or range.

    `path` stands before the names in messages, such as "messages[2]"; empty for the request itself.
    """

    def __init__(self, values: JsonObject, path: str = "") -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()

    def param(self, name: str) -> str:
        """Return `name` as the client knows it."""
        return f"{self._path}.{name}" if self._path else name

    def value(self, name: str) -> object:
        """Return the value, of any type."""
        self._read.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.value(name) is not None

    def text(self, name: str) -> str | None:
        """Return a string that is valid Unicode."""
        value = self.value(name)
        return None if value is None else as_text(self.param(name), value)

    def flag(self, name: str) -> bool:
        """Return a boolean; absent is false."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            refuse(self.param(name), f"{shown(value)} is neither true nor false")
        return bool(value)

    def integer(self, name: str, low: int = 0, high: int = MAX_UINT32) -> int | None:
        """Return an integer from `low` to `high`, both included."""
        value = self.value(name)
        return None if value is None else as_integer(self.param(name), value, low, high)

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(self.param(name), f"{shown(value)} is not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            refuse(self.param(name), "is not a finite number")
        return number

    def items(self, name: str) -> list[object] | None:
        """Return an array."""
        value = self.value(name)
        if value is not None and not isinstance(value, list):
            refuse(self.param(name), f"{shown(value)} is not an array")
        return value

    def inner(self, name: str) -> Fields | None:
        """Return an object as fields of their own."""
        value = self.value(name)
        return None if value is None else as_fields(self.param(name), value)

    def finish(self, ignored: Collection[str], harmless: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse every field that has not been read, except null, `ignored` names, and values that ask for nothing (`harmless`,
        by name)."""
        for name, value in self._values.items():
            if value is None or name in self._read or name in ignored:
                continue
            if name not in harmless:
                param = self.param(name[:MAX_SHOWN_CHARS])
                raise UnknownName(param, f"{param}: is not known here; leave it out")
            if not any(type(value) is type(good) and value == good for good in harmless[name]):
                refuse(self.param(name), "is not supported; leave it out")


def as_fields(param: str, value: object) -> Fields:
    """Return `value` as an object. Raises InvalidArgument."""
    if not isinstance(value, dict):
        refuse(param, f"{shown(value)} is not an object")
    return Fields(value, param)


def as_text(param: str, value: object) -> str:
    """Return `value` as a string that is valid Unicode. Raises InvalidArgument."""
    if not isinstance(value, str):
        refuse(param, f"{shown(value)} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(param, "is not valid Unicode (it holds half of a surrogate pair)")
    return value


def as_integer(param: str, value: object, low: int = 0, high: int = MAX_UINT32) -> int:
    """Return `value` as an integer in a range. Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(param, f"{shown(value)} is not an integer")
    if not low <= value <= high:
        refuse(param, f"{shown(value)} is not from {low} to {high}")
    return value


def json_text(param: str, value: object) -> str:
    """Return `value` as JSON text. Raises InvalidArgument."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        refuse(param, "is not valid Unicode, not a JSON number, or nested too deeply")
    return text


def shown(value: object) -> str:
    """Return a value for an error message: short, and never a whole object, array or long number."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of many digits"
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
