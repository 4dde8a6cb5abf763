"""Llama 3: `{"name": …, "parameters": {…}}` as the whole answer, or behind `<|python_tag|>`; several with `;` between them."""

from __future__ import annotations

from pdmesh.text.parsers.calls import call, calls
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, guessed, marked
from pdmesh.text.parsers.reader import Reader, Step

MARKS = Marks(("<|python_tag|>",), ("<|eom_id|>", "<|eot_id|>"))
FORM = Form("", f'{{"name": "{NAME}", "parameters": ', "}", "; ", "")


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    then = marked(MARKS, lambda reader, mark: several(reader))
    return guessed("{[", several, then, MARKS.close)


def several(reader: Reader) -> Step[None]:
    """Read calls with semicolons between them. Raises NotJson."""
    yield from calls(reader)
    while (yield from reader.skip_space()) == ";":
        reader.at += 1
        yield from call(reader)


FORMAT = ToolFormat(
    parse,
    FORM,
    signs=(("<|python_tag|>",), ("<|start_header_id|>ipython",), ('"parameters": dictionary',)),
    more_marks=(*MARKS.open, *MARKS.close),
)
