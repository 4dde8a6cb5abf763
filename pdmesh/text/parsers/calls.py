"""Calls as JSON objects: `{"name": …, "arguments": {…}}`, as most formats have them, one or a list."""

from __future__ import annotations

import json
import re

from pdmesh.text.parsers.json_text import NotJson, dumped, expect, text_of, text_of_string, value
from pdmesh.text.parsers.machine import listed
from pdmesh.text.parsers.reader import Reader, Step

NAMES = ("name", "function", "tool", "tool_name", "function_name")
ARGUMENTS = ("arguments", "parameters", "args", "input")
IDS = ("id", "call_id", "tool_call_id")
_KINDS = ("function", "tool_call", "tool_use", "call")
"""Values of the member `type`, which say nothing else."""
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
"""An id behind the arguments comes too late: the call has ours by then."""
NO_ARGUMENTS = "{}"


def call(reader: Reader) -> Step[None]:
    """Read one call. Raises NotJson."""
    yield from _call(reader)
    reader.close_call()


def _call(reader: Reader, call_id: str = "", *, is_within: bool = False) -> Step[None]:
    yield from expect(reader, "{")
    name, held, is_open, has_arguments = "", "", False, False
    while True:
        key = yield from text_of_string(reader)
        yield from expect(reader, ":")
        if key in NAMES and not name:
            if not is_within and (yield from reader.skip_space()) == "{":  # OpenAI's: {"function": {"name": …, "arguments": …}}
                yield from _call(reader, call_id, is_within=True)
                is_open = has_arguments = True
                name = key
            else:
                name = yield from text_of_string(reader)
        elif key in ARGUMENTS and not has_arguments:
            has_arguments = True
            if name:
                reader.open_call(name, call_id)
                is_open = True
                yield from arguments(reader)
            else:
                held = yield from _held_arguments(reader)
        elif key in IDS and not is_open and not call_id:
            call_id = yield from _text_or_value(reader)
        else:
            said = yield from text_of(reader)
            if not _says_nothing(key, said):
                _refuse_member(reader, key, said, is_open=is_open)
        behind = yield from reader.skip_space()
        if behind == "}":
            reader.at += 1
            break
        if behind != "," and is_open:  # the arguments are there: small models forget one brace of two
            reader.unparsed("", "'}' is missing behind the arguments")
            break
        yield from expect(reader, ",")
    if not name:
        raise NotJson("a call has no name")
    if not is_open:
        reader.open_call(name, call_id)
        reader.arguments(held or NO_ARGUMENTS)


def _says_nothing(key: str, said: str) -> bool:
    text = said.strip('"')
    return (key == "type" and text in _KINDS) or (key == "index" and text.isdigit()) or (key in IDS and bool(_ID.fullmatch(text)))


def _refuse_member(reader: Reader, key: str, said: str, *, is_open: bool) -> None:
    """What is no part of a call is text: it stands behind the call, if that is open already. Raises NotJson if it is not."""
    why = f"{key[:40]!r} is no part of a call"
    if not is_open:
        raise NotJson(why)
    reader.unparsed(f"{json.dumps(key, ensure_ascii=False)}: {said}", why)
    reader.settle()


def arguments(reader: Reader) -> Step[None]:
    """Read the arguments of the call that is open: an object, or a string that holds one. Raises NotJson."""
    character = yield from reader.skip_space()
    if character == "{":
        yield from value(reader, reader.arguments)
    else:
        reader.arguments((yield from _held_arguments(reader)))


def _held_arguments(reader: Reader) -> Step[str]:
    character = yield from reader.skip_space()
    if character == '"':
        text = (yield from text_of_string(reader)).strip() or NO_ARGUMENTS
    else:
        text = yield from text_of(reader)
    if text == "null":
        return NO_ARGUMENTS
    try:
        held = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict):
        raise NotJson("arguments are no object")
    if _is_strict(text):
        return text
    try:
        return dumped(held)
    except ValueError:
        raise NotJson("arguments hold a number that is none") from None


def _is_strict(text: str) -> bool:
    """Return whether JSON text has no line end or other control character within its strings, which clients do not read. Pure."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _text_or_value(reader: Reader) -> Step[str]:
    if (yield from reader.skip_space()) == '"':
        return (yield from text_of_string(reader))
    return (yield from text_of(reader))


def calls(reader: Reader) -> Step[None]:
    """Read one call, or a list of calls. Raises NotJson."""
    if (yield from reader.skip_space()) == "[":
        yield from listed(reader, call)
    else:
        yield from call(reader)
