"""GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

from __future__ import annotations

from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, marked, name_until
from pdmesh.text.parsers.reader import Reader, Step
from pdmesh.text.parsers.tagged import Tags, arguments, parameters

_END = "</tool_call>"
MARKS = Marks(("<tool_call>",))
TAGS = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_WRITTEN_TAGS = Tags("<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n")
FORM = Form("", f"<tool_call>{NAME}\n", _END, "\n", "", tags=_WRITTEN_TAGS)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""

    def body(reader: Reader, mark: str) -> Step[None]:
        yield from reader.skip_space()
        name, behind = yield from name_until(reader, "\n", TAGS.key, _END)
        if behind != "\n":
            reader.at -= len(behind)
        reader.open_call(name)
        yield from arguments(reader, TAGS, parameters(schemas, name), _END)

    return marked(MARKS, body)


FORMAT = ToolFormat(parse, FORM, signs=(("<arg_key>",),), opening="<tool_call>", more_marks=(_END, *TAGS[:4]))
