"""Granite 3 and 4: a list of calls in JSON behind `<|tool_call|>` or `<tool_call>`."""

from __future__ import annotations

from pdmesh.text.parsers.calls import calls
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat, Variant
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, marked

MARKS = Marks(("<|tool_call|>", "<tool_call>"), ("</tool_call>",))
FORM = Form("<|tool_call|>[", f'{{"name": "{NAME}", "arguments": ', "}", ", ", "]")

EACH = Variant(
    Form("", f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>", "\n", ""),
    "<tool_call>",
    signs=("<tool_call>",),
    lacks=("<|tool_call|>",),
)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return marked(MARKS, lambda reader, mark: calls(reader))


FORMAT = ToolFormat(
    parse,
    FORM,
    signs=(("<|tool_call|>",), ("<|start_of_role|>", "<tool_call>")),
    opening="<|tool_call|>",
    more_marks=("<tool_call>", "</tool_call>"),
    variants=(EACH,),
)
