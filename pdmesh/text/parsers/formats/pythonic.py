"""Llama 3.2 and 4, and others: `[f(a=1), g(b="x")]` as the whole answer, or between `<|python_start|>` and `<|python_end|>`."""

from __future__ import annotations

from pdmesh.text.parsers.forcing import NAME, Form
from pdmesh.text.parsers.json_text import expect
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, attempt, marked
from pdmesh.text.parsers.python_text import call
from pdmesh.text.parsers.reader import Reader, Step

MARKS = Marks(("<|python_start|>",), ("<|python_end|>", "<|eom|>"))
FORM = Form("[", f"{NAME}(", ")", ", ", "]", is_python=True)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    then = marked(MARKS, lambda reader, mark: calls(reader))

    def program(reader: Reader) -> Step[None]:
        reader.mark()
        character = yield from reader.skip_space()
        before = reader.since_mark()
        if character == "[":
            yield from attempt(reader, before, lambda reader, mark: calls(reader), is_guess=True)
        else:
            reader.content(before)
        yield from then(reader)

    return program


def calls(reader: Reader) -> Step[None]:
    """Read a list of calls. Raises NotJson."""
    yield from expect(reader, "[")
    while True:
        yield from call(reader)
        if (yield from reader.skip_space()) == "]":
            reader.at += 1
            return
        yield from expect(reader, ",")
