"""Readers for the values of parameters, which come as JSON or as InferParameter, and often as text ("0.7"). Errors name the
field."""

import json
import math
from collections.abc import Callable

from pdmesh.sampling_params import Kind, Parameter
from pdmesh.v1 import common_pb2
from router.api.validation import refuse

Value = object
Read = Callable[[str, Value], object]
_UINT32 = 2**32


def number(field: str, value: Value) -> float:
    """Return a finite number, which may come as text."""
    if isinstance(value, str):
        given = value
        try:
            value = float(given)
        except ValueError:
            refuse(field, f"{given[:100]!r} is not a number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        refuse(field, f"{str(value)[:100]} is not a finite number")
    return float(value)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def whole(low: int, high: int) -> Callable[[str, Value], int]:
    """Return a reader of whole numbers in [low, high), which may come as text."""

    def read(field: str, value: Value) -> int:
        if isinstance(value, str):
            given = value
            try:
                value = int(given)
            except ValueError:
                refuse(field, f"{given[:100]!r} is not a whole number")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(field, f"{str(value)[:100]} is not a whole number")
        if not low <= value < high:
            refuse(field, f"{str(value)[:100]} is not from {low} to {high - 1}")
        return value

    return read


count = whole(0, _UINT32)


def count_or_all(field: str, value: Value) -> int:
    """-1 is a usual way to say "all", which is 0 here."""
    return max(0, whole(-1, _UINT32)(field, value))


def flag(field: str, value: Value) -> bool:
    """Return a truth value, which may come as text."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        refuse(field, f"{str(value)[:100]} is neither true nor false")
    return value


def text(field: str, value: Value) -> str:
    """Return text that is valid Unicode."""
    if not isinstance(value, str):
        refuse(field, f"{str(value)[:100]} is not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(field, "is not valid Unicode (it holds half of a surrogate pair)")
    return value


def texts(field: str, value: Value) -> list[str]:
    """Return a list of strings from one string, a list, or such a list as JSON text."""
    value = _from_json(value, "[") if isinstance(value, str) else value
    if isinstance(value, str):
        return [text(field, value)]
    if not isinstance(value, list):
        refuse(field, f"{str(value)[:100]} is neither text nor a list of texts")
    return [text(f"{field}[{position}]", item) for position, item in enumerate(value)]


def counts(field: str, value: Value) -> list[int]:
    """Return a list of numbers from one number, a list, or such a list as JSON text."""
    value = _from_json(value, "[") if isinstance(value, str) else value
    if not isinstance(value, list):
        return [count(field, value)]
    return [count(f"{field}[{position}]", item) for position, item in enumerate(value)]


def schema(field: str, value: Value) -> str:
    """Return a JSON Schema as text, from text or from the object itself."""
    if isinstance(value, str):
        return text(field, value)
    if not isinstance(value, dict):
        refuse(field, f"{str(value)[:100]} is no JSON Schema: send an object, or its text")
    return text(field, json.dumps(value, ensure_ascii=False))


def alternatives(field: str, value: Value) -> common_pb2.Alternatives:
    """Return a list of strings as a constraint."""
    return common_pb2.Alternatives(values=texts(field, value))


def _from_json(value: str, begin: str) -> Value:
    """Return `value` parsed where it is JSON that starts with `begin`; else unchanged."""
    if not value.lstrip().startswith(begin):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def reader(parameter: Parameter) -> Read:
    """What reads a sampling parameter that is no list."""
    if parameter.kind is Kind.NUMBER:
        return number
    if parameter.kind is Kind.FLAG:
        return flag
    return count_or_all if parameter.rules.is_minus_one_all else whole(0, 2**parameter.rules.bits)
