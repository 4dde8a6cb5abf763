"""Kimi K2: a section of calls, each `functions.NAME:INDEX`, a mark, and the arguments in JSON. The first is the call's id."""

from __future__ import annotations

from pdmesh.text.parsers.calls import arguments
from pdmesh.text.parsers.forcing import INDEX, NAME, Form, ToolFormat
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, another, ended, marked, name_until
from pdmesh.text.parsers.reader import Reader, Step

MARKS = Marks(("<|tool_calls_section_begin|>",))
_END = "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
FORM = Form(MARKS.open[0], f"{_CALL}functions.{NAME}:{INDEX}{_ARGUMENTS}", _CALL_END, "", _END)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return marked(MARKS, _calls)


def _calls(reader: Reader, mark: str) -> Step[None]:
    while (yield from another(reader, _CALL, _END)):
        call_id, _ = yield from name_until(reader, _ARGUMENTS)
        reader.open_call(name_of(call_id), call_id)
        yield from arguments(reader)
        reader.close_call()
        yield from ended(reader, _CALL_END)


def name_of(call_id: str) -> str:
    """Return the name in an id such as functions.get_weather:0. Pure."""
    name, colon, index = call_id.rpartition(":")
    return (name if colon and index.isdigit() else call_id).removeprefix("functions.")


FORMAT = ToolFormat(parse, FORM, signs=(MARKS.open,), opening=MARKS.open[0], ends_thoughts=True)
