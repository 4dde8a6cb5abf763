"""Thoughts before an answer, between marks. Templates of some models end with the opening mark: then the output begins inside."""

from __future__ import annotations

from typing import NamedTuple

from pdmesh.text.parsers.machine import Parse, Trimmed
from pdmesh.text.parsers.reader import Reader, Step


class ThinkMarks(NamedTuple):
    """What stands before and behind thoughts. `always_begun`: an output begins within thoughts whether or not the mark stands
    before it. `behind`: what stands between thoughts and what follows them. `answer`: what stands before an answer that is no
    call."""

    open: str
    close: str
    always_begun: bool = False
    behind: str = "\n\n"
    answer: str = ""

    def are_in(self, template: str) -> bool:
        """Return whether a chat template has these marks. A model whose template has only the closing one, which it cuts the
        thoughts of earlier turns off with, may leave out the opening one."""
        has_open, has_close = self.open in template, self.close in template
        return has_close and not has_open if self.always_begun else has_close or has_open

    @property
    def is_text(self) -> bool:
        """Return whether the marks are words that may stand in any text."""
        return self.open[0].isalpha()


def thinking(marks: ThinkMarks, then: Parse, *, has_begun: bool, ends: tuple[str, ...] = ()) -> Parse:
    """Return a program that reads thoughts, and goes on with `then`. `has_begun`: the prompt ends with the opening mark. `ends`:
    marks of calls that end thoughts as well, for models that leave out the closing mark."""

    def program(reader: Reader) -> Step[None]:
        if (yield from _begin(reader, marks.open, has_begun=has_begun)):
            yield from _thoughts(reader, (marks.close, *ends))
            yield from reader.skip_space()
        elif not marks.is_text:
            reader.strays[marks.close] = _NOT_BEGUN
        yield from then(reader)

    return program


def before_answer(marks: ThinkMarks, *, has_begun: bool, trims: bool) -> Parse:
    """Return a program that reads an output which a constraint holds behind thoughts. What stands around those is written as
    the constraint has it, and all that follows is the answer: no mark in it is one. `trims`: white space at the ends of
    thoughts belongs to their marks."""

    def program(reader: Reader) -> Step[None]:
        if (yield from _begin(reader, marks.open, has_begun=has_begun)):
            yield from _thoughts(reader, (marks.close,), trims=trims)
            yield from reader.accept(marks.behind)
        yield from reader.accept(marks.answer)
        yield from plain(reader)

    return program


_NOT_BEGUN = "thoughts end that had not begun; with --reasoning-parser deepseek_r1 an output begins with thoughts"


def _begin(reader: Reader, mark: str, *, has_begun: bool) -> Step[bool]:
    """Read the mark before thoughts, if one comes; return whether thoughts follow."""
    reader.mark()
    yield from reader.skip_space()
    is_open = bool((yield from reader.accept(mark)))
    if not is_open:
        reader.unread()
    if is_open or has_begun:
        reader.open_thoughts()
        return True
    reader.unmark()
    return False


def _thoughts(reader: Reader, marks: tuple[str, ...], *, trims: bool = True) -> Step[None]:
    out = Trimmed(reader.thought)
    mark = yield from reader.until(marks, out if trims else reader.thought)
    if mark in marks[1:]:
        reader.at -= len(mark)
    if mark:
        reader.close_thoughts()
        out.take_space()
    else:
        out.end()


def plain(reader: Reader) -> Step[None]:
    """Read an output without calls: all of it is content."""
    yield from reader.text_until((), reader.content)
