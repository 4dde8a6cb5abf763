"""Mistral: `[TOOL_CALLS]` before a list of calls in JSON, or, since tokenizer v11, before each `NAME[ARGS]{…}`."""

from __future__ import annotations

from pdmesh.text.parsers.calls import arguments, calls
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat, Variant
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, marked, name_until
from pdmesh.text.parsers.reader import Reader, Step

MARKS = Marks(("[TOOL_CALLS]",))
_ARGUMENTS, _ID = "[ARGS]", "[CALL_ID]"
FORM = Form("[TOOL_CALLS][", f'{{"name": "{NAME}", "arguments": ', "}", ", ", "]")
BY_NAME = Variant(Form("", f"{MARKS.open[0]}{NAME}{_ARGUMENTS}", "", "", ""), MARKS.open[0], signs=(_ARGUMENTS,))


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return marked(MARKS, _calls)


def _calls(reader: Reader, mark: str) -> Step[None]:
    if (yield from reader.skip_space()) in ("[", "{"):
        yield from calls(reader)
        return
    name, behind = yield from name_until(reader, _ARGUMENTS, _ID, "{")
    call_id = ""
    if behind == _ID:
        call_id, _ = yield from name_until(reader, _ARGUMENTS)
    elif behind == "{":
        reader.at -= 1
    reader.open_call(name, call_id)
    yield from arguments(reader)
    reader.close_call()


FORMAT = ToolFormat(
    parse,
    FORM,
    signs=(MARKS.open,),
    opening=MARKS.open[0],
    more_marks=(_ARGUMENTS, _ID),
    ends_thoughts=True,
    variants=(BY_NAME,),
)
