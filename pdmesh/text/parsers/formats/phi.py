"""Phi-4: a list of calls in JSON behind `functools`, or between `<|tool_call|>` and `<|/tool_call|>`."""

from __future__ import annotations

from pdmesh.text.parsers.calls import calls
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat, Variant
from pdmesh.text.parsers.json_text import NotJson
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, marked
from pdmesh.text.parsers.reader import Reader, Step

MARKS = Marks(("functools", "<|tool_call|>"), ("<|/tool_call|>",))
FORM = Form("functools[", f'{{"name": "{NAME}", "arguments": ', "}", ", ", "]")

MARKED = Variant(
    Form("<|tool_call|>[", FORM.before, "}", ", ", "]<|/tool_call|>"),
    "<|tool_call|>",
    signs=("<|/tool_call|>",),
    lacks=("functools",),
)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return marked(MARKS, _calls)


def _calls(reader: Reader, mark: str) -> Step[None]:
    if mark == "functools" and (yield from reader.peek()) != "[":
        raise NotJson("the word functools, and no list behind it")
    yield from calls(reader)


FORMAT = ToolFormat(
    parse,
    FORM,
    signs=(("functools",), ("<|/tool_call|>",), ("<|tool|>", "<|/tool|>")),
    opening="functools[",
    more_marks=("<|tool_call|>", "<|/tool_call|>"),
    variants=(MARKED,),
)
