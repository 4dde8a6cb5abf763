"""MiniMax M2: `<minimax:tool_call>` around `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`."""

from __future__ import annotations

from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, another, marked, name_until
from pdmesh.text.parsers.reader import Reader, Step
from pdmesh.text.parsers.tagged import Tags, arguments, parameters

_END = "</minimax:tool_call>"
MARKS = Marks(("<minimax:tool_call>",))
_INVOKE = "<invoke name="
_TAGS = Tags("<parameter name=", ">", "", "</parameter>")
_WRITTEN_TAGS = Tags('<parameter name="', '">', "", "</parameter>\n")
FORM = Form("<minimax:tool_call>\n", f'{_INVOKE}"{NAME}">\n', "</invoke>\n", "", _END, tags=_WRITTEN_TAGS)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""

    def body(reader: Reader, mark: str) -> Step[None]:
        while (yield from another(reader, _INVOKE, _END)):
            quoted, _ = yield from name_until(reader, ">")
            name = quoted.strip("\"'")
            reader.open_call(name)
            yield from arguments(reader, _TAGS, parameters(schemas, name), "</invoke>")

    return marked(MARKS, body)


FORMAT = ToolFormat(
    parse,
    FORM,
    signs=(("<minimax:tool_call>",), ("minimax:tool_call", "<invoke name=")),
    opening="<minimax:tool_call>",
    more_marks=("</minimax:tool_call>",),
)
