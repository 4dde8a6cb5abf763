"""GPT-OSS: harmony. Messages with a channel each: analysis is thought, final and commentary are text, and a message to
`functions.NAME` is a call.

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pdmesh.text.parsers.calls import arguments
from pdmesh.text.parsers.forcing import NAME, Form, ToolFormat
from pdmesh.text.parsers.machine import Parse, Schemas, attempt
from pdmesh.text.parsers.reader import Reader, Step
from pdmesh.text.parsers.reasoning import ThinkMarks

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_FUNCTIONS = "functions."
_TO = r"(?:\s*to=(?P<{}>[^\s<]+))?"
_HEADER = re.compile(
    rf"(?:{re.escape(START)}\s*assistant{_TO.format('first')}\s*)?"
    rf"(?:{re.escape(CHANNEL)}\s*(?P<channel>analysis|commentary|final){_TO.format('second')}\s*)?"
    rf"(?:(?:{re.escape(CONSTRAIN)})?\s*(?:json|code)\s*)?{re.escape(MESSAGE)}"
)
"""A header, whole. A model may leave out the mark before `json`."""
_THOUGHTS, _FINAL = "analysis", "final"
MAX_HEADER = 512
"""Characters: so much is held back until it is clear that it is none."""
_WRONG = "a header of a message is wrong"
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
    has_begun = True  # the prompt may have begun a message
    while mark := (yield from reader.until((START, CHANNEL, MESSAGE, *ENDS), reader.content)):
        if mark not in ENDS:
            has_begun = yield from _headed(reader, mark)
            continue
        if not has_begun:
            reader.unparsed(mark, "a message ends that had not begun")
        has_begun = False


def _headed(reader: Reader, mark: str) -> Step[bool]:
    """Read a message with its end, or a header that is wrong; return whether that has begun a message."""
    reader.mark(len(mark))
    header = _HEADER.fullmatch((yield from _header(reader, mark)))
    if header is not None:
        yield from _message(reader, header["first"] or header["second"] or "", header["channel"] or "")
        return False
    wrong = reader.since_mark()
    reader.unparsed(wrong, _WRONG)
    return not wrong.endswith(ENDS)


def _header(reader: Reader, mark: str) -> Step[str]:
    """Return a header that a mark begins; what is none is read up to where the next one may begin."""
    pieces = [mark]
    while mark not in (MESSAGE, *ENDS, ""):
        mark = yield from reader.until((START, CHANNEL, MESSAGE, *ENDS), pieces.append, MAX_HEADER)
        if mark == START or (mark == CHANNEL and CHANNEL in pieces):
            reader.at -= len(mark)
            break
        pieces.append(mark)
    return "".join(pieces)


def _message(reader: Reader, recipient: str, channel: str) -> Step[None]:
    if recipient.startswith(_FUNCTIONS):
        reader.unmark()
        yield from attempt(reader, "", lambda reader, mark: _call(reader, recipient.removeprefix(_FUNCTIONS)))
    elif recipient:
        reader.unparsed(reader.since_mark(), f"a message to {recipient[:80]}, which is no function")
    elif channel == _THOUGHTS:
        yield from _thoughts(reader)
        return
    else:
        reader.unmark()
    yield from _rest(reader, reader.content)


def _call(reader: Reader, name: str) -> Step[None]:
    reader.open_call(name)
    yield from arguments(reader)
    reader.close_call()
    yield from reader.skip_space()


def _thoughts(reader: Reader) -> Step[None]:
    reader.open_thoughts()
    if (yield from _rest(reader, reader.thought)):
        reader.close_thoughts()


def _rest(reader: Reader, on_text: Callable[[str], None]) -> Step[bool]:
    """Read a message to its end; return whether that has come."""
    mark = yield from reader.until((START, *ENDS), on_text)
    if mark == START:
        reader.at -= len(mark)
    return bool(mark)


FORMAT = ToolFormat(
    parse,
    FORM,
    signs=(("<|channel|>", "<|message|>"),),
    opening=f"{CHANNEL}commentary to={_FUNCTIONS}",
    more_marks=(START, CHANNEL, MESSAGE, *ENDS, CONSTRAIN),
    thoughts=ThinkMarks(
        f"{CHANNEL}{_THOUGHTS}{MESSAGE}", ENDS[0], behind=f"{START}assistant", answer=f"{CHANNEL}{_FINAL}{MESSAGE}"
    ),
)
