"""GPT-OSS: harmony. Messages with a channel each: analysis is thought, final and commentary are text, and a message to
`functions.NAME` is a call.

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re

from pdmesh.text.parsers.calls import arguments
from pdmesh.text.parsers.forcing import NAME, Form
from pdmesh.text.parsers.machine import Parse, Schemas, attempt
from pdmesh.text.parsers.reader import Reader, Step

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_THOUGHTS = "analysis"
FORM = Form(
    "",
    f"{CHANNEL}commentary to={_FUNCTIONS}{NAME} <|constrain|>json{MESSAGE}",
    ENDS[-1],
    f"{START}assistant",
    "",
)


def parse(schemas: Schemas) -> Parse:
    """Return the program of the format."""
    return _program


def _program(reader: Reader) -> Step[None]:
    while mark := (yield from reader.until((START, CHANNEL, MESSAGE, *ENDS), reader.content)):
        if mark in ENDS:
            continue
        reader.mark(len(mark))
        pieces: list[str] = []
        while mark and mark != MESSAGE:
            mark = yield from reader.until((START, CHANNEL, MESSAGE), pieces.append)
            pieces.append(" ")
        if not mark:
            reader.unparsed(reader.since_mark(), f"{MESSAGE} is missing")
            return
        reader.unmark()
        yield from _message(reader, "".join(pieces))


def _message(reader: Reader, header: str) -> Step[None]:
    recipient = _RECIPIENT.search(header)
    if recipient is not None and recipient[1].startswith(_FUNCTIONS):
        yield from attempt(reader, "", lambda reader, mark: _call(reader, recipient[1].removeprefix(_FUNCTIONS)))
        yield from _rest(reader, is_thought=False)
    elif recipient is not None:
        reader.unparsed("", f"a message to {recipient[1]}, which is no function")
        yield from _rest(reader, is_thought=False)
    else:
        yield from _rest(reader, is_thought=_THOUGHTS in header)


def _call(reader: Reader, name: str) -> Step[None]:
    reader.open_call(name)
    yield from arguments(reader)
    reader.close_call()
    yield from reader.skip_space()


def _rest(reader: Reader, *, is_thought: bool) -> Step[None]:
    mark = yield from reader.until((START, *ENDS), reader.thought if is_thought else reader.content)
    if mark == START:
        reader.at -= len(mark)
