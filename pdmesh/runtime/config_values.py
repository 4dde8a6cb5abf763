"""Between text (a flag or an environment variable) and the value of a configuration field, by the field's type.

Types: str, int, float, bool, Literal of str, Enum, `X | None` (an empty text is None) and tuple[X, ...] (comma-separated; an
empty text is the empty tuple). Numbers are plain and finite. `format_value` is the inverse of `parse_value`.
"""

from __future__ import annotations

import enum
import math
import re
import types
import typing
from typing import Literal, get_args, get_origin

Value = object
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def is_supported(type_: object) -> bool:
    """Whether `type_` is one that this module can parse."""
    if (inner := optional_of(type_)) is not None:
        return optional_of(inner) is None and is_supported(inner)
    if (item := item_of(type_)) is not None:
        return item_of(item) is None and item is not bool and is_supported(item)
    return type_ in (str, int, float, bool) or choices_of(type_) is not None


def optional_of(type_: object) -> object | None:
    """X of `X | None`, else None."""
    if get_origin(type_) not in (typing.Union, types.UnionType):
        return None
    inner = [arg for arg in get_args(type_) if arg is not types.NoneType]
    return inner[0] if len(inner) == 1 and len(get_args(type_)) == 2 else None


def item_of(type_: object) -> object | None:
    """X of tuple[X, ...], else None."""
    args = get_args(type_)
    return args[0] if get_origin(type_) is tuple and len(args) == 2 and args[1] is Ellipsis else None


def choices_of(type_: object) -> dict[str, Value] | None:
    """Value by text for a Literal of strings or an Enum (the text is its value if that is a string, else its lower-case name)."""
    if get_origin(type_) is Literal:
        literals = get_args(type_)
        return {value: value for value in literals} if all(isinstance(value, str) for value in literals) else None
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return {member.value if isinstance(member.value, str) else member.name.lower(): member for member in type_}
    return None


def type_name(type_: object) -> str:
    """What a person reads as the kind of value: "integer", "a|b", "text, text, ..."."""
    if (inner := optional_of(type_)) is not None:
        return f"{type_name(inner)} or empty"
    if (item := item_of(type_)) is not None:
        return f"{type_name(item)},..."
    if (choices := choices_of(type_)) is not None:
        return "|".join(choices)
    return {str: "text", int: "integer", float: "number", bool: "true|false"}[typing.cast("type", type_)]


def parse_value(type_: object, text: str) -> Value:
    """`text` as a value of `type_`. Raises ValueError that says what is wrong with the text and what would be right."""
    if (inner := optional_of(type_)) is not None:
        return parse_value(inner, text) if text else None
    if (item := item_of(type_)) is not None:
        return tuple(parse_value(item, part.strip()) for part in text.split(",")) if text.strip() else ()
    if (choices := choices_of(type_)) is not None:
        return _parse_choice(choices, text)
    if type_ is str:
        return text
    return {int: _parse_int, float: _parse_float, bool: _parse_bool}[typing.cast("type", type_)](text)


def format_value(type_: object, value: Value) -> str:
    """The text that `parse_value` reads as `value`. Raises ValueError for what has no such text (a comma inside a tuple's
    item)."""
    if value is None:
        return ""
    inner = optional_of(type_) or type_
    if (item := item_of(inner)) is not None and isinstance(value, tuple):
        text = ",".join(format_value(item, part) for part in value)
    elif (choices := choices_of(inner)) is not None:
        text = next(name for name, member in choices.items() if member == value)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    else:
        text = str(value)
    if parse_value(type_, text) != value:
        raise ValueError(f"{value!r} cannot be written as {type_name(type_)}")
    return text


def _parse_choice(choices: dict[str, Value], text: str) -> Value:
    if text not in choices:
        raise ValueError(f"{_shown(text)} is not known; give one of {', '.join(choices)}")
    return choices[text]


def _parse_int(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{_shown(text)} is not an integer; give a number such as 8")
    return int(text)


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{_shown(text)} is not a finite number; give one such as 0.5")
    return value


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in (*_TRUE, *_FALSE):
        raise ValueError(f"{_shown(text)} is neither true nor false; give true or false")
    return lowered in _TRUE


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else repr(text[:77] + "...")
