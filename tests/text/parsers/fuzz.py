"""Random outputs for the parsers, and what must hold of each: nothing is raised, no text is lost, and tokens are as good as a
whole.

    python -m tests.text.parsers.fuzz --streams 100000 [--seed 1] [--tools hermes]     the whole (`make fuzz-parsers`)

An output is a list of tokens: marks, parts of marks, pieces of calls, text in several scripts, single bytes of characters. Every
Greek letter, Chinese character, emoji and replacement character of it is *payload*: no mark and no syntax has any, so each one
has to come out once, in content, in thoughts, or in the name, the id or the arguments of a call. Where nothing was called, every
other character has to come out as well, in order, but for white space and the marks that stand around thoughts; so has a mark
that stands around nothing. In harmony, where headers are written in several ways, that is so of the marks that end messages.
Where a constraint holds the answer, all that stands behind thoughts is the answer, to the character.
"""

from __future__ import annotations

import argparse
import codecs
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdmesh.text.parsers.events import CallArguments, CallOpened, Content, Event, Message, Thought, Unparsed
from pdmesh.text.parsers.formats.harmony import ENDS, MESSAGE
from pdmesh.text.parsers.reader import SPACE
from pdmesh.text.parsers.registry import NONE, REASONING_FORMATS, TOOL_FORMATS, make_parser, marks_of
from tests.text.parsers.writers import WRITERS

PAYLOAD = frozenset("αβγδεζηθικλμνξοπρστυφχψωςΩ東京大阪🙂🎈\ufffd")
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "find": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "days": {"type": "integer"},
            "on": {"type": "boolean"},
            "parts": {"type": "array"},
            "mode": {"enum": ["α", "β"]},
            "deep": {"type": "object"},
        },
    },
    "stop": {"type": "object"},
}
_SYNTAX = (
    *' \n\t{}[]"\\:,()=<>/|`#;',
    '"name"',
    '"arguments"',
    '"id": "',
    "null",
    "True",
    "0.5",
    "-3e2",
    "\\n",
    "\\ud83d",
    "find",
)
_TEXTS = ("αβγ", "δε ζη", "θ", "東京", "🙂", "ικλ.", "\nμν\n", "ξ, ο", "say", "π'ρ", 'σ"τ', "υ=φ", "[χ]", "{ψ}", "ω<", "ς\\")
_BYTES = (b"\xe6", b"\x9d", b"\xb1", b"\xf0\x9f", b"\x99\x82", b"\xff", b"\xce")
_VALUES: tuple[Any, ...] = ("αβ", "θ <b> 'ι'", "大阪\nκ", "", 7, -0.5, True, None, ["λ", [1, {"μ": []}]], {"ν": {"ξ": "ο"}})
_CHANNELS = ("<|channel|>analysis", "<|channel|>commentary", "<|channel|>final", "")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Stream:
    """A random output: the formats that it is read in, and its tokens as bytes."""

    tools: str
    reasoning: str
    has_begun: bool
    tokens: tuple[bytes, ...]

    @property
    def pieces(self) -> list[str]:
        """The text of each token: a character comes with its last byte."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [*map(decoder.decode, self.tokens), decoder.decode(b"", final=True)]

    @property
    def marks(self) -> list[str]:
        found = all_marks(self.tools, self.reasoning) | {*_HEADERS.get(self.tools, ())}
        return sorted(found, key=len, reverse=True)


def all_marks(tools: str, reasoning: str) -> set[str]:
    """What stands around text and calls in two formats, and is no text."""
    writers = WRITERS.get(tools, ())
    return {*marks_of(tools, reasoning), *(writer.opening for writer in writers), *_FENCES.get(tools, ())} - {""}


_FENCES = {"json": ("```json", "```"), "gemma": ("```tool_code", "```")}
_HEADERS = {
    "json": ("json", "`"),
    "gemma": ("tool_code", "`"),
    "harmony": tuple(f"{start}{channel}" for start in ("<|start|>assistant", "") for channel in _CHANNELS if start or channel),
}
"""What else belongs to marks: it is taken out of what came and of what was sent, before both are compared."""


def drawn(rng: random.Random, names: Sequence[str] = (NONE, *TOOL_FORMATS)) -> Stream:
    """Draw an output in one of some formats: of loose tokens, or of calls that were written right and then spoiled."""
    tools, reasoning = rng.choice(names), rng.choice([NONE, *REASONING_FORMATS])
    marks = sorted(all_marks(tools, reasoning))
    text = _spoiled(rng, tools, reasoning) if rng.random() < 0.7 and tools != NONE else []
    text += [_token(rng, tools, marks) for _ in range(rng.randint(0, 12 if text else 30))]
    return Stream(tools, reasoning, reasoning != NONE and rng.random() < 0.3, tuple(text))


def _token(rng: random.Random, tools: str, marks: Sequence[str]) -> bytes:
    kind = rng.random()
    if kind < 0.2 and marks:
        return rng.choice(marks).encode()
    if kind < 0.3 and marks:
        mark = rng.choice(marks)
        return _slice(rng, mark).encode()
    if kind < 0.35:
        return rng.choice(_BYTES)
    if kind < 0.5 and tools != NONE:
        return _slice(rng, _written(rng, tools)).encode()
    text: str = rng.choice(_TEXTS if kind < 0.7 else _SYNTAX)
    return text.encode()


def _written(rng: random.Random, tools: str) -> str:
    calls = [(rng.choice(("find", "stop", "χψω")), _arguments(rng)) for _ in range(rng.randint(1, 3))]
    return rng.choice(WRITERS[tools]).calls(calls)


def _arguments(rng: random.Random) -> dict[str, Any]:
    keys = rng.sample(("text", "days", "on", "parts", "mode", "deep", "πρ"), rng.randint(0, 4))
    return {key: rng.choice(_VALUES) for key in keys}


def _slice(rng: random.Random, text: str) -> str:
    begin = rng.randrange(len(text))
    return text[begin : begin + rng.randint(1, 25)]


def _spoiled(rng: random.Random, tools: str, reasoning: str) -> list[bytes]:
    text = _written(rng, tools)
    if reasoning != NONE and rng.random() < 0.5:
        text = rng.choice((f"{REASONING_FORMATS[reasoning].open}ξοπ{REASONING_FORMATS[reasoning].close}\n", "ρστ")) + text
    tokens = _cut(rng, text.encode(), rng.randint(1, 20))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        place = rng.randrange(len(tokens) + 1)
        change = rng.random()
        if change < 0.4:
            del tokens[place : place + 1]
        elif change < 0.5:
            del tokens[place:]
        else:
            tokens.insert(place, _token(rng, tools, sorted(all_marks(tools, reasoning))))
    return tokens


def _cut(rng: random.Random, whole: bytes, num_cuts: int) -> list[bytes]:
    ends = sorted({rng.randrange(1, len(whole)) for _ in range(num_cuts)}) if len(whole) > 1 else []
    return [whole[begin:end] for begin, end in zip([0, *ends], [*ends, len(whole)], strict=True)]


def events_of(stream: Stream, pieces: Iterable[str], *, is_constrained: bool = False) -> list[Event]:
    """What the parser finds in an output that comes in these pieces."""
    begun = stream.has_begun
    parser = make_parser(stream.tools, stream.reasoning, SCHEMAS, has_begun=begun, is_constrained=is_constrained)
    found = [event for piece in pieces for event in parser.feed(piece)]
    return found + parser.finish()


def message_of(events: Iterable[Event]) -> Message:
    """What events add up to."""
    message = Message()
    for event in events:
        message.add(event)
    return message


def check(stream: Stream) -> None:
    """Raise AssertionError that shows the output, where something does not hold."""
    text = "".join(stream.pieces)
    whole = events_of(stream, [text])
    message = message_of(whole)
    assert message_of(events_of(stream, stream.pieces)) == message, f"by tokens it is another: {stream}"
    assert message_of(events_of(stream, text)) == message, f"by characters it is another: {stream}"
    _check_payload(text, whole, stream)
    if not message.calls:
        said = "".join(event.text for event in whole if isinstance(event, Content | Thought | Unparsed))
        _check_said(text, said, whole, stream)
    for event in whole:
        _check_sendable(event, stream)
    for call in message.calls:
        assert not call.is_whole or isinstance(json.loads(call.arguments), dict), f"whole, and no object: {stream}"
        assert call.is_whole or message.warnings, f"not whole, and no warning: {stream}"


def _check_sendable(event: Event, stream: Stream) -> None:
    """Half of a surrogate pair is no text: no message could carry it."""
    for value in vars(event).values():
        assert not isinstance(value, str) or value.encode("utf-8", "ignore").decode() == value, f"no UTF-8: {stream}"


def _check_said(text: str, said: str, events: Sequence[Event], stream: Stream) -> None:
    """Where nothing was called, only marks that stand around something are missing."""
    if stream.tools != "harmony":
        assert _SPACE.sub("", said) == _SPACE.sub("", "".join(_apart(text, stream))), f"text is lost: {stream}"
        return
    assert _bare(said, stream.marks) == _bare(text, stream.marks), f"text is lost: {stream}"
    num_ends, num_messages = (sum(text.count(mark) - said.count(mark) for mark in marks) for marks in (ENDS, (MESSAGE,)))
    num_headers = sum(isinstance(event, Unparsed) and event.text not in ENDS for event in events)  # those that are text
    assert num_ends <= num_messages + num_headers + 1, f"ends are lost, beyond those of messages and of the prompt's: {stream}"


def check_constrained(stream: Stream) -> None:
    """Raise AssertionError that shows the output, where something of an answer that a constraint holds is lost or changed."""
    text = "".join(stream.pieces)
    message = message_of(events_of(stream, [text], is_constrained=True))
    tokens = message_of(events_of(stream, stream.pieces, is_constrained=True))
    assert tokens == message, f"by tokens it is another: {stream}"
    thoughts, answer = _apart(text, stream, is_constrained=True)
    assert message.content == answer and not message.calls and not message.warnings, f"the answer is lost: {stream}"
    assert _SPACE.sub("", message.thoughts) == _SPACE.sub("", thoughts), f"thoughts are lost: {stream}"


def _apart(text: str, stream: Stream, *, is_constrained: bool = False) -> tuple[str, str]:
    """Thoughts and what follows them, without the marks around thoughts that the output begins with: another reading."""
    form = TOOL_FORMATS.get(stream.tools)
    marks = (form.thoughts if form else None) or REASONING_FORMATS.get(stream.reasoning)
    if marks is None:
        return "", text
    thoughts, answer, begun = "", text, text.lstrip(SPACE)
    if begun.startswith(marks.open) or stream.has_begun:
        within = begun.removeprefix(marks.open)
        thoughts, close, answer = within.partition(marks.close)
        opening = form.opening if form and form.ends_thoughts and not is_constrained else ""
        if opening and opening in thoughts:
            thoughts, _, rest = within.partition(opening)
            answer, close = opening + rest, ""
        if is_constrained and close:
            answer = answer.removeprefix(marks.behind)
    return thoughts, answer.removeprefix(marks.answer) if is_constrained else answer


def _check_payload(text: str, events: Sequence[Event], stream: Stream) -> None:
    wanted = Counter(character for character in text if character in PAYLOAD)
    has_names = stream.tools == "kimi"  # its ids contain the name
    found = Counter(character for event in events for character in _text_of(event, has_names) if character in PAYLOAD)
    assert found == wanted, f"lost {wanted - found}, too many {found - wanted}: {stream}"
    content = [character for event in events for character in _content_of(event) if character in PAYLOAD]
    rest = iter(text)
    assert all(character in rest for character in content), f"content in another order: {stream}"


def _text_of(event: Event, id_has_name: bool) -> str:
    match event:
        case CallOpened(_, name, call_id):
            return call_id if id_has_name else call_id + name
        case CallArguments(_, text):
            return text
    return _content_of(event)


def _content_of(event: Event) -> str:
    return event.text if isinstance(event, Content | Thought | Unparsed) else ""


def _bare(text: str, marks: Sequence[str]) -> str:
    """A text without marks and white space, also without those that are left where one was taken out of another."""
    pattern = re.compile("|".join(re.escape(_SPACE.sub("", mark)) for mark in marks) or "(?!)")
    bare, before = _SPACE.sub("", text), ""
    while bare != before:
        bare, before = pattern.sub("", bare), bare
    return bare


def main(arguments: Sequence[str]) -> int:
    """Check many outputs; print what was done."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument(
        "--tools", choices=(NONE, *TOOL_FORMATS), action="append", help="one format of calls alone; may be repeated"
    )
    asked = options.parse_args(arguments)
    rng, began, num_tokens, num_calls = random.Random(asked.seed), time.monotonic(), 0, 0
    names = asked.tools or [NONE, *TOOL_FORMATS]
    for _ in range(asked.streams):
        stream = drawn(rng, names)
        check(stream)
        check_constrained(stream)
        num_tokens += len(stream.tokens)
        num_calls += sum(isinstance(event, CallOpened) for event in events_of(stream, stream.pieces))
    figures = {"streams": asked.streams, "seed": asked.seed, "tools": names, "tokens": num_tokens, "calls": num_calls}
    print(json.dumps({**figures, "seconds": round(time.monotonic() - began, 1)}))  # what the command is for
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
