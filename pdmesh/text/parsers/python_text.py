"""Calls in the words of Python: `f(a=1, b=["x", None])`. Arguments are literals, which become JSON."""

from __future__ import annotations

import ast
import json
import re

from pdmesh.text.parsers.json_text import MAX_DEPTH, NotJson, dumped, loaded
from pdmesh.text.parsers.machine import name_until
from pdmesh.text.parsers.reader import Reader, Step

_CONSTANTS = {"true": True, "false": False, "null": None}
_OPEN, _CLOSE = "([{", ")]}"
_NAME = re.compile(r"[\w.:/-]+")
"""Of tools, which may have names that Python has not: those of MCP often have a hyphen."""
_KEY = re.compile(r"""[^\s"'()\[\]{}=,#]+""")
MAX_SOURCE = 1 << 20
"""Characters of one argument."""


def call(reader: Reader) -> Step[None]:
    """Read one call. Raises NotJson."""
    name, _ = yield from name_until(reader, "(")
    if not _NAME.fullmatch(name):
        raise NotJson(f"{name[:40]!r} is no name of a function")
    reader.open_call(name)
    separator = "{"
    while (yield from reader.skip_space()) != ")":
        key, _ = yield from name_until(reader, "=")
        if not _KEY.fullmatch(key):
            raise NotJson(f"{key[:40]!r} is no name of an argument")
        text = as_json((yield from source(reader)))
        reader.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {text}")
        separator = ", "
        if (yield from reader.peek()) == ",":
            reader.at += 1
    reader.at += 1
    reader.arguments("{}" if separator == "{" else "}")
    reader.close_call()


def source(reader: Reader) -> Step[str]:
    """Read the source of one argument, up to the comma or bracket that ends it. Raises NotJson."""
    read, depth, quote, begun = "", 0, "", 0
    while character := (yield from reader.peek()):
        if len(read) > MAX_SOURCE or depth > MAX_DEPTH:
            raise NotJson("an argument is too long, or nested too deep")
        if not quote and not depth and character in ",)":
            return read
        if not quote and character == "#":
            raise NotJson("a comment is no argument")
        reader.at += 1
        read += character
        if quote:
            if character == "\\":
                read += yield from reader.take()
            elif len(read) - begun >= len(quote) and read.endswith(quote):
                quote = ""
        elif character in "\"'":
            two_more = yield from reader.accept(character * 2)
            read += two_more
            quote, begun = character + two_more, len(read)
        else:
            depth += (character in _OPEN) - (character in _CLOSE)
    raise NotJson("an argument has no end")


def as_json(text: str) -> str:
    """Return the JSON of a literal; one that Python cannot hold, such as 1e400, is taken if it is JSON. Raises NotJson. Pure."""
    written = text.strip()
    try:
        return _json_of(ast.parse(written, mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        if _is_json(written):
            return written
        raise NotJson(f"{written[:40]!r} is no literal") from None


def _is_json(text: str) -> bool:
    try:
        loaded(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_of(node: ast.expr | None) -> str:
    """Return the JSON of a literal, every member of a dict included, whatever its key. Raises ValueError, TypeError."""
    match node:
        case ast.Name(name) if name in _CONSTANTS:
            return json.dumps(_CONSTANTS[name])
        case ast.List(items) | ast.Tuple(items):
            return "[" + ", ".join(map(_json_of, items)) + "]"
        case ast.Dict(keys, values):
            return "{" + ", ".join(f"{_key_of(key)}: {_json_of(each)}" for key, each in zip(keys, values, strict=True)) + "}"
        case ast.expr():
            return dumped(ast.literal_eval(node))
    raise ValueError("a dict is unpacked")


def _key_of(node: ast.expr | None) -> str:
    text = _json_of(node)
    return text if text.startswith('"') else json.dumps(text)
