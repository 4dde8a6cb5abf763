"""Qwen3-Coder and Qwen 3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from __future__ import annotations

from pdmesh.text.parsers.calls import calls
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.json_text import NotJson
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, expect_mark, marked, name_until
from pdmesh.text.parsers.reader import Reader, Step
from pdmesh.text.parsers.tagged import Tags, arguments, parameters

_FUNCTION = "<function="
MARKS = Marks(("<tool_call>", _FUNCTION), ("</tool_call>",))
_TAGS = Tags("<parameter=", ">", "", "</parameter>", has_breaks=True)
FORM = Form("", f"<tool_call>\n<function={NAME}>\n", "</function>\n</tool_call>", "\n", "", tags=_TAGS)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format; calls in JSON between its marks are read as well."""

    def body(reader: Reader, mark: str) -> Step[None]:
        if mark != _FUNCTION:
            if (yield from reader.skip_space()) == "{":
                yield from calls(reader)
                return
            yield from expect_mark(reader, _FUNCTION)
        name, _ = yield from name_until(reader, ">")
        if len(name) > 128 or "<" in name:
            raise NotJson(f"{name[:40]!r} is no name of a function")
        reader.open_call(name)
        yield from arguments(reader, _TAGS, parameters(schemas, name), "</function>")

    return marked(MARKS, body)


FORMAT = ToolFormat(parse, FORM, signs=((_FUNCTION,),), opening="<tool_call>", more_marks=MARKS.close)
