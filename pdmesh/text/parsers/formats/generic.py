"""An answer that is a call, or a list of calls, in JSON and nothing else; perhaps in a block of code."""

from __future__ import annotations

from pdmesh.text.parsers.calls import calls
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.machine import Parse, Schemas, Trimmed, attempt, closed
from pdmesh.text.parsers.reader import Reader, Step

_FENCES = ("```json", "```")
FORM = Form("[", f'{{"name": "{NAME}", "arguments": ', "}", ", ", "]")


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return _program


def _program(reader: Reader) -> Step[None]:
    reader.mark()
    yield from reader.skip_space()
    fence = yield from reader.accept(*_FENCES)
    character = yield from reader.skip_space()
    before = reader.since_mark()
    if character not in ("{", "["):
        reader.content(before)
    else:
        yield from attempt(reader, before, lambda reader, mark: calls(reader), is_guess=True)
        if fence and reader.num_calls:
            yield from closed(reader, ("```",))
    out = Trimmed(reader.content, has_begun=not reader.num_calls)
    yield from reader.text_until((), out)
    out.end()


FORMAT = ToolFormat(parse, FORM, signs=())
