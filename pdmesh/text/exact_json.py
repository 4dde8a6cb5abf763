"""JSON whose numbers stay as they are written: where a double is another number, its text is kept beside it.

    value = json.loads(text, parse_float=number_of)     numbers with a fraction or an exponent: some are a LongNumber
    dumps(value)                                        writes those as they were written

A schema passes through many hands between a client and the compiler of its grammar. Each would round such a number, and the
compiler, which refuses what it cannot keep, would see a number that looks right.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from typing import Any

MAX_DIGITS = 17
"""Of a number with a fraction: so many say which double is meant, more say a number that no double is."""

_DIGITS = re.compile(r"[^0-9]")
_MARK = f"number-{secrets.token_hex(16)}-"
"""Stands for a LongNumber while the rest is written. It is random, so no text holds it."""
_MARKED = re.compile(rf'"{_MARK}(\d+)"')


class LongNumber(float):
    """A number that is written with more digits than a double keeps; `text`: as it is written."""

    text: str


def number_of(text: str) -> float:
    """Return a number with a fraction or an exponent, for `json.loads`: a LongNumber where a double is another number, unless it
    is beyond all doubles. Pure."""
    if len(text) <= MAX_DIGITS and "e-" not in text.lower():
        return float(text)
    number, digits = float(text), _DIGITS.sub("", text.lower().partition("e")[0]).strip("0")
    if math.isinf(number) or (len(digits) <= MAX_DIGITS and bool(number) == bool(digits)):
        return number
    found = LongNumber(number)
    found.text = text
    return found


def dumps(value: object, **how: Any) -> str:
    """Return a value as `json.dumps` does, and each LongNumber in it as it is written. Raises as `json.dumps` does."""
    if not _has_long_number(value):
        return json.dumps(value, **how)
    numbers: list[str] = []
    text = json.dumps(_marked(value, numbers), **how)
    return _MARKED.sub(lambda found: numbers[int(found[1])], text)


def _has_long_number(root: object) -> bool:
    ahead = [root]
    while ahead:
        value = ahead.pop()
        if isinstance(value, LongNumber):
            return True
        if isinstance(value, dict):
            ahead += value.values()
        elif isinstance(value, list | tuple):
            ahead += value
    return False


def _marked(value: object, numbers: list[str]) -> object:
    """Return a copy with a text in place of each LongNumber; `numbers` takes what is to stand there."""
    if isinstance(value, LongNumber):
        numbers.append(value.text)
        return f"{_MARK}{len(numbers) - 1}"
    if isinstance(value, dict):
        return {key: _marked(each, numbers) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each, numbers) for each in value]
    return value
