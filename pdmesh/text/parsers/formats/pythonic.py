"""Llama 3.2 and 4, and others: `[f(a=1), g(b="x")]` as the whole answer, or between `<|python_start|>` and `<|python_end|>`."""

from __future__ import annotations

from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, guessed, listed, marked
from pdmesh.text.parsers.python_text import call
from pdmesh.text.parsers.reader import Reader, Step

MARKS = Marks(("<|python_start|>",), ("<|python_end|>", "<|eom|>"))
FORM = Form("[", f"{NAME}(", ")", ", ", "]", is_python=True)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return guessed("[", calls, marked(MARKS, lambda reader, mark: calls(reader)))


def calls(reader: Reader) -> Step[None]:
    """Read a list of calls. Raises NotJson."""
    yield from listed(reader, call)


FORMAT = ToolFormat(
    parse, FORM, signs=(("<|python_start|>",), ("func_name1(params_name1",)), more_marks=(*MARKS.open, *MARKS.close)
)
