"""JSON in the output of a model: read character by character, given on as it is written, and checked on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from pdmesh.text.parsers.reader import Reader, Step

MAX_DEPTH = 64
_ESCAPES = '"\\/bfnrt'
_LITERALS = ("true", "false", "null")
_NUMBER = "0123456789+-.eE"
_HALF = re.compile(r"[\ud800-\udfff]")


class NotJson(Exception):
    """What was read is no JSON. The text behind it is not read yet."""


def value(reader: Reader, give: Callable[[str], None], depth: int = 0) -> Step[None]:
    """Read one value, and give its text away as it comes. Raises NotJson.

    A number ends before the first character that does not belong to it, anything else with its last one.
    """
    if depth > MAX_DEPTH:
        raise NotJson(f"it is nested more than {MAX_DEPTH} deep")
    character = yield from reader.skip_space()
    if character == "{":
        yield from _object(reader, give, depth)
    elif character == "[":
        yield from _array(reader, give, depth)
    elif character == '"':
        yield from string(reader, give)
    elif character and character in "-0123456789":
        yield from _number(reader, give)
    else:
        yield from _literal(reader, give)


def text_of(reader: Reader) -> Step[str]:
    """Read one value, and return its text. Raises NotJson."""
    pieces: list[str] = []
    yield from value(reader, pieces.append)
    return "".join(pieces)


def text_of_string(reader: Reader) -> Step[str]:
    """Read a string, and return what it says. Raises NotJson."""
    if (yield from reader.skip_space()) != '"':
        raise NotJson("a string is missing")
    pieces: list[str] = []
    yield from string(reader, pieces.append)
    return decoded("".join(pieces))


def decoded(text: str) -> str:
    """Return what the text of a JSON string says. Raises NotJson. Pure."""
    try:
        found = json.loads(text, strict=False)
        found.encode()  # half of a surrogate pair is no text
    except ValueError as error:
        raise NotJson(f"a string is wrong: {error}") from None
    return str(found)


def loaded(text: str) -> Any:
    """Return what JSON says. Raises ValueError (NaN and the infinities are no JSON), RecursionError. Pure."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def dumped(value: object) -> str:
    """Return JSON that UTF-8 can hold: halves of surrogate pairs, which stand in strings alone, are escapes, and readers of JSON
    join them. Raises ValueError for NaN and infinities. Pure."""
    return _HALF.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False, allow_nan=False))


def expect(reader: Reader, character: str) -> Step[None]:
    """Read a character behind white space. Raises NotJson where another stands."""
    found = yield from reader.skip_space()
    if found != character:
        raise NotJson(f"{character!r} is missing" + (f" before {found!r}" if found else ": the output ended"))
    reader.at += 1


def _object(reader: Reader, give: Callable[[str], None], depth: int) -> Step[None]:
    yield from expect(reader, "{")
    give("{")
    if (yield from _closed(reader, give, "}")):
        return
    while True:
        if (yield from reader.skip_space()) != '"':
            raise NotJson("a name of a member is missing")
        yield from string(reader, give)
        yield from expect(reader, ":")
        give(": ")
        yield from value(reader, give, depth + 1)
        if (yield from _closed(reader, give, "}")):
            return
        yield from expect(reader, ",")
        give(", ")


def _array(reader: Reader, give: Callable[[str], None], depth: int) -> Step[None]:
    yield from expect(reader, "[")
    give("[")
    if (yield from _closed(reader, give, "]")):
        return
    while True:
        yield from value(reader, give, depth + 1)
        if (yield from _closed(reader, give, "]")):
            return
        yield from expect(reader, ",")
        give(", ")


def _closed(reader: Reader, give: Callable[[str], None], end: str) -> Step[bool]:
    if (yield from reader.skip_space()) != end:
        return False
    reader.at += 1
    give(end)
    return True


def string(reader: Reader, give: Callable[[str], None]) -> Step[None]:
    """Read a string that begins here, and give its text away; control characters are escaped. Raises NotJson."""
    give((yield from reader.take()))
    while True:
        marker = yield from reader.until(('"', "\\"), lambda text: give(_escaped(text)))
        if marker == '"':
            give(marker)
            return
        if not marker:
            raise NotJson("a string has no end")
        give("\\" + (yield from _escape(reader)))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(json.dumps(each)[1:-1] if each < " " else each for each in text)


def _escape(reader: Reader) -> Step[str]:
    character = yield from reader.take()
    if character and character in _ESCAPES:
        return character
    if character != "u":
        raise NotJson(f"\\{character} is no escape")
    digits = ""
    while len(digits) < 4:
        digit = yield from reader.take()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise NotJson(f"\\u{digits}{digit} is no escape")
        digits += digit
    return "u" + digits


def _number(reader: Reader, give: Callable[[str], None]) -> Step[None]:
    digits = ""
    while (character := (yield from reader.peek())) and character in _NUMBER:
        digits += character
        reader.at += 1
    try:
        json.loads(digits)
    except ValueError:
        raise NotJson(f"{digits[:40]} is no number") from None
    give(digits)


def _literal(reader: Reader, give: Callable[[str], None]) -> Step[None]:
    found = yield from reader.accept(*_LITERALS)
    if not found:
        raise NotJson("a value is missing")
    give(found)
