"""Hermes, Qwen 2.5 and 3, and many fine-tuned models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` for each."""

from __future__ import annotations

from pdmesh.text.parsers.calls import calls
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, marked

MARKS = Marks(("<tool_call>",), ("</tool_call>",))
FORM = Form("", f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>", "\n", "")


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return marked(MARKS, lambda reader, mark: calls(reader))


FORMAT = ToolFormat(parse, FORM, signs=(MARKS.open,), opening=MARKS.open[0], more_marks=MARKS.close)
