"""The text of a model as it comes, for parsers that are written as if all of it were there.

A parser is a generator. Where it needs text that has not come it yields, and goes on when there is more; so what it finds does
not depend on how the text was cut. What it has found by then is sent at once.

    reader = Reader(); machine = parse(reader)     feed: reader gets text, the generator runs until it yields again
                                                   finish: reader.has_ended, the generator runs to its end
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from pdmesh.text.parsers.events import CallArguments, CallClosed, CallOpened, Content, Event, Thought, Unparsed

T = TypeVar("T")
Step = Generator[None, None, T]
"""A part of a parser: yields where it waits for text, and returns what it found."""
SPACE = " \t\r\n"


class Reader:
    """Text that has come and is not read yet, the place in it, and the events so far. `strays`: marks that end what
    had not begun, each with the reason for a warning: the first of each that stands in text gives one."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False
        self.num_calls = 0
        self.num_closed = 0
        self.strays: dict[str, str] = {}
        self._events: list[Event] = []
        self._num_forgotten = 0
        self._thoughts: deque[list[int]] = deque()  # begin and end, in characters of the output; without an end: they go on

    def feed(self, text: str) -> None:
        """Take text."""
        self.text += text

    def take_events(self) -> list[Event]:
        """Return what was found since the last call."""
        found, self._events = self._events, []
        return found

    # Reading.

    def peek(self) -> Step[str]:
        """Return the next character, "" at the end of the output."""
        while self.at >= len(self.text):
            if self.has_ended:
                return ""
            self._forget()
            yield
        return self.text[self.at]

    def take(self) -> Step[str]:
        """As `peek`, and read it."""
        character = yield from self.peek()
        self.at += len(character)
        return character

    def skip_space(self) -> Step[str]:
        """Read white space; return the character behind it, unread."""
        while (character := (yield from self.peek())) and character in SPACE:
            self.at += 1
        return character

    def follows(self, *markers: str) -> Step[str]:
        """Return which of the markers comes next, the longest of several, unread; "" if none does."""
        longest = ""
        for marker in sorted(markers, key=len):
            if (yield from self._has(marker)):
                longest = marker
        return longest

    def accept(self, *markers: str) -> Step[str]:
        """As `follows`, and read it."""
        found = yield from self.follows(*markers)
        self.at += len(found)
        return found

    def until(self, markers: Sequence[str], on_text: Callable[[str], None], most: int | None = None) -> Step[str]:
        """Read text up to the first of some markers, giving it away as it comes; return the marker, read, or "" at the end, or
        behind `most` characters without one."""
        while True:
            place, marker = _first(self.text, self.at, markers, has_ended=self.has_ended)
            end = place if marker or self.has_ended else len(self.text) - _begun(self.text[self.at :], markers)
            if most is not None and end - self.at > most:
                self._give(self.at + most, on_text)
                return ""
            most = None if most is None else most - max(0, end - self.at)
            self._give(end, on_text)
            if marker or self.has_ended:
                self.at += len(marker)
                return marker
            self._forget()
            yield

    def text_until(self, markers: Sequence[str], on_text: Callable[[str], None]) -> Step[str]:
        """As `until`, of text for the reader: a stray mark is text as well, with a warning."""
        while (mark := (yield from self.until((*markers, *self.strays), on_text))) in self.strays:
            on_text(mark)
            self.unparsed("", self.strays.pop(mark))
        return mark

    def _give(self, end: int, on_text: Callable[[str], None]) -> None:
        if end > self.at:
            text, self.at = self.text[self.at : end], end
            on_text(text)

    def _has(self, marker: str) -> Step[bool]:
        while len(self.text) - self.at < len(marker):
            if self.has_ended or not marker.startswith(self.text[self.at :]):
                return False
            yield
        return self.text.startswith(marker, self.at)

    # Going back. Within a call, the mark is the place up to which all that was read is in an event.

    _mark: int | None = None

    def mark(self, behind: int = 0) -> None:
        """Remember the place so many characters back: what follows may turn out to be something else."""
        self._mark = self.at - behind

    def unmark(self) -> None:
        """What was read since the mark was what it looked like."""
        self._mark = None

    def since_mark(self) -> str:
        """Return what was read since the mark, and forget that place."""
        assert self._mark is not None, "no place was marked"
        read, self._mark = self.text[self._mark : self.at], None
        return read

    def unread(self) -> None:
        """Go back to the mark, which stays."""
        assert self._mark is not None, "no place was marked"
        self.at = self._mark

    def settle(self) -> None:
        """What was read since the mark is a part of calls, and will not be read again."""
        if self._mark is not None:
            self._mark = self.at

    def _forget(self) -> None:
        """Drop what was read; everything behind a mark stays."""
        keep = self.at if self._mark is None else self._mark
        self.text = self.text[keep:]
        self.at -= keep
        self._num_forgotten += keep
        self._mark = None if self._mark is None else 0

    # Where thoughts stand, in characters of the whole output.

    @property
    def num_settled(self) -> int:
        """Return up to where it is certain what is thought: the place that was read, or the mark behind which it may change."""
        return self._num_forgotten + (self.at if self._mark is None else self._mark)

    def is_thought(self, begin: int, end: int) -> bool:
        """Return whether any of the characters from `begin` up to `end` stands in thoughts or their marks. That is certain of
        those before `num_settled`, and at the end of the output. To be asked in order: thoughts that end before `begin` are
        forgotten. Per-token path."""
        thoughts = self._thoughts
        while thoughts and len(thoughts[0]) > 1 and thoughts[0][1] <= begin:
            thoughts.popleft()
        return bool(thoughts) and thoughts[0][0] < end

    def open_thoughts(self) -> None:
        """Thoughts begin at the mark, with what opens them; what was read since is no longer in question."""
        assert self._mark is not None, "no place was marked"
        self._thoughts.append([self._num_forgotten + self._mark])
        self.unmark()

    def close_thoughts(self) -> None:
        """Thoughts end here, behind what closes them. Those that the end of the output cuts off are left open."""
        self._thoughts[-1].append(self._num_forgotten + self.at)

    # Events.

    def content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def thought(self, text: str) -> None:
        if text:
            self._events.append(Thought(text))

    def open_call(self, name: str, call_id: str = "") -> None:
        """A call begins; what was read of it will not be read again."""
        self._events.append(CallOpened(self.num_calls, name, call_id))
        self.num_calls += 1
        self.settle()

    def arguments(self, text: str) -> None:
        """The text read since the last piece is this piece of the open call's arguments."""
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))
        self.settle()

    def close_call(self, *, is_whole: bool = True) -> None:
        """The open call ends. If it is not whole, what was read since the last piece is still to be given."""
        self._events.append(CallClosed(self.num_calls - 1, is_whole))
        self.num_closed += 1
        if is_whole:
            self.settle()

    def unparsed(self, text: str, why: str) -> None:
        self._events.append(Unparsed(text, why))


def _first(text: str, start: int, markers: Sequence[str], *, has_ended: bool) -> tuple[int, str]:
    """Return place and marker of the one that begins first, the longest of several there; "" while none is certain. Pure."""
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker, start)) >= 0]
    place, _, marker = min(found, default=(len(text), 0, ""))
    if marker and not has_ended and any(other.startswith(text[place:]) and len(other) > len(marker) for other in markers):
        return len(text), ""  # a longer one may still come
    return place, marker


def _begun(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin a marker. Pure."""
    longest = max((len(marker) for marker in markers), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
