"""What a model's output is made of: text, thoughts, and calls of tools.

A call is opened once its name is known; the pieces of its arguments, joined, are JSON text. Text that a parser could not read is
`Unparsed`: it belongs to the content, and a client may be warned.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class CallOpened:
    """A call begins. `index`: from 0, in order. `call_id`: the model's own; "" where its format has none."""

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallClosed:
    """A call has ended. `is_whole`: its arguments are a JSON object."""

    index: int
    is_whole: bool


@dataclass(frozen=True)
class Unparsed:
    """Text of the model that looked like a call, or a part of one, and is none. `why`: for people."""

    text: str
    why: str


Event = Content | Thought | CallOpened | CallArguments | CallClosed | Unparsed


@dataclass
class Call:
    """A call, as far as it has come."""

    name: str
    call_id: str = ""
    arguments: str = ""
    is_whole: bool = False


@dataclass
class Message:
    """A message, as far as it has come: what its events add up to, however they were cut."""

    content: str = ""
    thoughts: str = ""
    calls: list[Call] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Content(text):
                self.content += text
            case Thought(text):
                self.thoughts += text
            case CallOpened(_, name, call_id):
                self.calls.append(Call(name, call_id))
            case CallArguments(index, text):
                self.calls[index].arguments += text
            case CallClosed(index, is_whole):
                self.calls[index].is_whole = is_whole
            case Unparsed(text, why):
                self.content += text
                self.warnings.append(why)
