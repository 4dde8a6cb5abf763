"""Gemma: 3 writes calls of Python in a block of `tool_code`; FunctionGemma and 4 write `call:NAME{KEY:VALUE,…}` between marks,
with `<escape>` around texts."""

from __future__ import annotations

import json

from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.json_text import MAX_DEPTH, NotJson, expect, value
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, ended, expect_mark, marked, name_until
from pdmesh.text.parsers.python_text import call
from pdmesh.text.parsers.reader import Reader, Step

_CODE, _CODE_END, _ESCAPE = "```tool_code", "```", "<escape>"
MARKS = Marks(("<start_function_call>", _CODE), ("<end_function_call>",))
FORM = Form(f"{_CODE}\n", f"{NAME}(", ")", "\n", f"\n{_CODE_END}", is_python=True)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return marked(MARKS, _calls)


def _calls(reader: Reader, mark: str) -> Step[None]:
    if mark == _CODE:
        yield from _code(reader)
        return
    yield from expect_mark(reader, "call:")
    name, _ = yield from name_until(reader, "{")
    reader.open_call(name)
    reader.at -= 1
    yield from _value(reader, 0)
    reader.close_call()


def _code(reader: Reader) -> Step[None]:
    is_list = (yield from reader.skip_space()) == "["
    reader.at += is_list
    while True:
        yield from call(reader)
        character = yield from reader.skip_space()
        if character == "," or (is_list and character == "]"):
            reader.at += 1
        if (yield from reader.skip_space()) in ("`", ""):
            yield from ended(reader, _CODE_END)
            return


def _value(reader: Reader, depth: int) -> Step[None]:
    if depth > MAX_DEPTH:
        raise NotJson(f"it is nested more than {MAX_DEPTH} deep")
    character = yield from reader.skip_space()
    if character == "{":
        yield from _members(reader, "{", "}", depth)
    elif character == "[":
        yield from _members(reader, "[", "]", depth)
    elif (yield from reader.accept(_ESCAPE)):
        reader.arguments('"')
        if not (yield from reader.until((_ESCAPE,), lambda text: reader.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))):
            raise NotJson(f"{_ESCAPE} is missing")
        reader.arguments('"')
    else:
        yield from value(reader, reader.arguments)


def _members(reader: Reader, begin: str, end: str, depth: int) -> Step[None]:
    yield from expect(reader, begin)
    reader.arguments(begin)
    is_first = True
    while (yield from reader.skip_space()) != end:
        if not is_first:
            yield from expect(reader, ",")
            reader.arguments(", ")
        is_first = False
        if begin == "{":
            key, _ = yield from name_until(reader, ":")
            key = key.removeprefix(_ESCAPE).removesuffix(_ESCAPE).strip('"')
            reader.arguments(json.dumps(key, ensure_ascii=False) + ": ")
        yield from _value(reader, depth + 1)
    reader.at += 1
    reader.arguments(end)


FORMAT = ToolFormat(
    parse,
    FORM,
    signs=(("<start_function_call>",), ("tool_code",)),
    opening=_CODE,
    more_marks=("<start_function_call>", "<end_function_call>", _ESCAPE),
)
