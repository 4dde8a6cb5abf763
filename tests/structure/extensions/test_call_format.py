"""A format of calls is one module and one line of `pdmesh/text/parsers/registry.py`."""

from __future__ import annotations

import pytest

from pdmesh.runtime.config import ConfigError, parse
from pdmesh.text.parsers.calls import calls
from pdmesh.text.parsers.forcing import NAME, Choice, Form, ToolFormat, grammar
from pdmesh.text.parsers.machine import Marks, Parse, Schemas, marked, parsed
from pdmesh.text.parsers.registry import TOOL_FORMATS, make_parser, marks_of, tool_format_of
from router.config import RouterConfig
from tests.text.parsers.test_formats import cuts

NEW = "arrows"
MARKS = Marks(("«call»",), ("«/call»",))
FORM = Form("", f'«call»{{"name": "{NAME}", "arguments": ', "}«/call»", "", "")


def program(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return marked(MARKS, lambda reader, mark: calls(reader))


FORMAT = ToolFormat(program, FORM, signs=(MARKS.open,), opening=MARKS.open[0], more_marks=(*MARKS.open, *MARKS.close))
FLAGS = ("--models", "m=folder", "--tool-parser", NEW)


def test_an_unknown_format_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ConfigError, match=f"'{NEW}' is not known; give one of auto, none, harmony"):
        parse(RouterConfig, FLAGS, {}, prog="router")


def test_a_new_format_is_read_and_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL_FORMATS, NEW, FORMAT)
    assert parse(RouterConfig, FLAGS, {}, prog="router").parsers_of("m") == (NEW, "auto")
    assert tool_format_of("{{ tools }} «call»") == NEW and set(marks_of(NEW, "none")) == {"«call»", "«/call»"}
    text = 'Now: «call»{"name": "stop", "arguments": {}}«/call»'
    for pieces in ([text], *cuts(text)):
        found = parsed(FORMAT.parse({}), pieces)
        assert (found.content, [(call.name, call.arguments) for call in found.calls]) == ("Now:", [("stop", "{}")])
    assert [*make_parser(NEW, "none", {}).feed(text)]
    assert '"«call»{' in grammar(FORM, {"stop": {}}, Choice(["stop"]), {}).replace('\\"', '"')
