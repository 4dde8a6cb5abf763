"""DeepSeek V3, R1 and V3.1: calls between marks of their own. V3 and R1 have `function`, a mark, the name, and the arguments in a
block of code; V3.1 has the name, the mark and the arguments."""

from __future__ import annotations

from pdmesh.text.parsers.calls import arguments
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat, Variant
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, another, closed, ended, marked, name_until
from pdmesh.text.parsers.reader import Reader, Step

MARKS = Marks(("<｜tool▁calls▁begin｜>",))
_END = "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"
FORM = Form(MARKS.open[0], f"{_CALL}function{_SEPARATOR}{NAME}\n{_FENCE}json\n", f"\n{_FENCE}{_CALL_END}", "\n", _END)
PLAIN = Variant(
    Form(MARKS.open[0], f"{_CALL}{NAME}{_SEPARATOR}", _CALL_END, "", _END),
    MARKS.open[0],
    signs=(_CALL,),
    lacks=(f"{_FENCE}json",),
)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return marked(MARKS, _calls)


def _calls(reader: Reader, mark: str) -> Step[None]:
    while (yield from another(reader, _CALL, _END)):
        name, _ = yield from name_until(reader, _SEPARATOR)
        if name == "function":
            name, behind = yield from name_until(reader, "\n", _FENCE)
            if behind == _FENCE:
                reader.at -= len(_FENCE)
            yield from closed(reader, (_FENCE + "json", _FENCE))
        reader.open_call(name)
        yield from arguments(reader)
        yield from closed(reader, (_FENCE,))
        reader.close_call()
        yield from ended(reader, _CALL_END)


FORMAT = ToolFormat(parse, FORM, signs=(MARKS.open,), opening=MARKS.open[0], ends_thoughts=True, variants=(PLAIN,))
