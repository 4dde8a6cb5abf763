"""The machine that every format is a program of: text goes in as it comes, events come out.

Whatever a model writes, no text is lost and nothing is raised: what looks like a call and is none is content, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pdmesh.text.parsers.events import Event, Message
from pdmesh.text.parsers.json_text import NotJson, expect
from pdmesh.text.parsers.reader import SPACE, Reader, Step

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""
Parse = Callable[[Reader], Step[None]]
"""A program: reads an output to its end."""


class OutputParser:
    """Parse one output."""

    def __init__(self, parse: Parse) -> None:
        self._reader = Reader()
        self._program: Step[None] | None = parse(self._reader)

    @property
    def num_settled(self) -> int:
        """Return of how many characters of the output it is certain whether they are thought."""
        return self._reader.num_settled

    def is_thought(self, begin: int, end: int) -> bool:
        """Return whether any of these characters of the output stands in thoughts, or in a mark around them. To be
        asked in order."""
        return self._reader.is_thought(begin, end)

    def feed(self, text: str) -> list[Event]:
        """Return what the output so far has beyond what was returned before."""
        self._reader.feed(text)
        return self._run()

    def finish(self) -> list[Event]:
        """Return the rest, at the end of the output."""
        self._reader.has_ended = True
        return self._run()

    def _run(self) -> list[Event]:
        reader = self._reader
        if self._program is not None:
            try:
                next(self._program)
            except StopIteration:
                self._program = None
        if self._program is None:  # what stands behind the end of a format
            reader.content(reader.text[reader.at :])
            reader.at = len(reader.text)
        return reader.take_events()


def parsed(parse: Parse, pieces: Iterable[str]) -> Message:
    """Return the message of a whole output, given in pieces."""
    parser, message = OutputParser(parse), Message()
    for piece in pieces:
        for event in parser.feed(piece):
            message.add(event)
    for event in parser.finish():
        message.add(event)
    return message


class Trimmed:
    """Give text away without white space at its ends, where it stands between marks."""

    def __init__(self, give: Callable[[str], None], *, has_begun: bool = False) -> None:
        """`has_begun`: white space at the beginning stays."""
        self._give = give
        self._has_begun = has_begun
        self._space = ""

    def __call__(self, text: str) -> None:
        if not self._has_begun:
            text = text.lstrip(SPACE)
        whole = self._space + text
        kept = whole.rstrip(SPACE)
        self._space = whole[len(kept) :]
        if kept:
            self._has_begun = True
            self._give(kept)

    def take_space(self) -> str:
        """Return the white space at the end so far, which a mark follows: it is dropped, unless the mark is none."""
        space, self._space = self._space, ""
        return space

    def end(self) -> None:
        """The output ends: its white space is its own."""
        if space := self.take_space():
            self._give(space)


class Marks(NamedTuple):
    """What stands around calls. `open`: any of them begins some. `close`: may stand behind, and is dropped."""

    open: tuple[str, ...]
    close: tuple[str, ...] = ()


def marked(marks: Marks, body: Callable[[Reader, str], Step[None]]) -> Parse:
    """Return the program of a format that has calls behind marks, and content elsewhere. `body` reads what stands behind an
    opening mark, which it gets; it raises NotJson."""

    def parse(reader: Reader) -> Step[None]:
        out = Trimmed(reader.content, has_begun=not reader.num_calls)
        while mark := (yield from reader.text_until(marks.open, out)):
            yield from attempt(reader, mark, body, marks.close, space=out.take_space())
            out = Trimmed(reader.content, has_begun=not reader.num_calls)
        out.end()

    return parse


def guessed(begins: str, body: Callable[[Reader], Step[None]], then: Parse, close: Sequence[str] = ()) -> Parse:
    """Return the program of a format whose calls may be the whole answer: one that begins with one of some characters is tried as
    calls. What stands behind them, and any other answer, is left to `then`."""

    def parse(reader: Reader) -> Step[None]:
        reader.mark()
        character = yield from reader.skip_space()
        before = reader.since_mark()
        if character and character in begins:
            yield from attempt(reader, before, lambda reader, mark: body(reader), close, is_guess=True)
        else:
            reader.content(before)
        yield from then(reader)

    return parse


def listed(reader: Reader, one: Callable[[Reader], Step[None]]) -> Step[None]:
    """Read a list with commas, in brackets, of what `one` reads; it has at least one item. Raises NotJson."""
    yield from expect(reader, "[")
    while True:
        yield from one(reader)
        if (yield from reader.skip_space()) == "]":
            reader.at += 1
            return
        yield from expect(reader, ",")


def attempt(
    reader: Reader,
    mark: str,
    body: Callable[[Reader, str], Step[None]],
    close: Sequence[str] = (),
    *,
    space: str = "",
    is_guess: bool = False,
) -> Step[None]:
    """Read calls behind a mark that was just read. What is none becomes content, behind the `space` before the mark; without a
    reason if calls were only guessed."""
    num_before, num_closed = reader.num_calls, reader.num_closed
    reader.mark(len(mark))
    try:
        yield from body(reader, mark)
        if reader.num_calls == num_before:
            raise NotJson("marks without a call")
    except NotJson as error:
        if reader.num_calls - num_before > reader.num_closed - num_closed:
            reader.close_call(is_whole=False)
        read = reader.since_mark()
        if reader.num_calls > num_before:
            reader.unparsed(read, str(error))
        elif is_guess:
            reader.content(space + read)
        else:
            reader.unparsed(space + read, str(error))
        return
    reader.unmark()
    if close:
        yield from closed(reader, close)


MAX_NAME = 256
"""Characters of a name: so much of what looks like a call is held back until it is clear that it is none."""


def name_until(reader: Reader, *marks: str) -> Step[tuple[str, str]]:
    """Read a name up to one of some marks; return both. Raises NotJson."""
    pieces: list[str] = []
    mark = yield from reader.until(marks, pieces.append, MAX_NAME)
    name = "".join(pieces).strip()
    if not mark or not name:
        raise NotJson(f"{marks[0]} is missing" if not mark else f"a name is missing before {mark}")
    return name, mark


def expect_mark(reader: Reader, *marks: str) -> Step[str]:
    """Read one of some marks behind white space, and return it. Raises NotJson."""
    yield from reader.skip_space()
    found = yield from reader.accept(*marks)
    if not found:
        raise NotJson(f"{marks[0]} is missing")
    return found


def another(reader: Reader, mark: str, end: str) -> Step[bool]:
    """Read the mark before a further call, or that behind the last one, which may be missing at the end of the output; return
    whether a call follows. Raises NotJson."""
    if not (yield from reader.skip_space()):
        return False
    return (yield from expect_mark(reader, mark, end)) == mark


def ended(reader: Reader, mark: str) -> Step[None]:
    """Read the mark behind a call, which may be missing at the end of the output. Raises NotJson."""
    if (yield from reader.skip_space()):
        yield from expect_mark(reader, mark)
    reader.settle()


def closed(reader: Reader, marks: Sequence[str]) -> Step[bool]:
    """Read a closing mark behind white space, if one stands there."""
    yield from reader.skip_space()
    return bool((yield from reader.accept(*marks)))
