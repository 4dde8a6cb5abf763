"""Thoughts before an answer, between marks. Templates of some models end with the opening mark: then the output begins inside."""

from __future__ import annotations

from typing import NamedTuple

from pdmesh.text.parsers.machine import Parse, Trimmed
from pdmesh.text.parsers.reader import Reader, Step


class ThinkMarks(NamedTuple):
    """What stands before and behind thoughts."""

    open: str
    close: str


def thinking(marks: ThinkMarks, then: Parse, *, has_begun: bool) -> Parse:
    """Return a program that reads thoughts, and goes on with `then`. `has_begun`: the prompt ends with the opening mark."""

    def program(reader: Reader) -> Step[None]:
        reader.mark()
        yield from reader.skip_space()
        is_open = bool((yield from reader.accept(marks.open)))
        if not is_open:
            reader.at -= len(reader.since_mark())
        if is_open or has_begun:
            reader.unmark()
            yield from _thoughts(reader, marks)
        yield from then(reader)

    return program


def _thoughts(reader: Reader, marks: ThinkMarks) -> Step[None]:
    out = Trimmed(reader.thought)
    if (yield from reader.until((marks.close,), out)):
        out.take_space()
        yield from reader.skip_space()
    else:
        out.end()


def plain(reader: Reader) -> Step[None]:
    """Read an output without calls: all of it is content."""
    yield from reader.until((), reader.content)
