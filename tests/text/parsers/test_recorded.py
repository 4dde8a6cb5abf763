"""Recorded outputs of every format give the same message in every cut of their bytes; tests/router/test_parsed_output.py
cuts their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import pytest

from pdmesh.text.parsers.events import Message
from pdmesh.text.parsers.registry import make_parser
from tests.text.parsers import recorded
from tests.text.parsers.recorded import Shape

NUM_SHAPES = 12
"""At least so many of every format."""


def message(shape: Shape, pieces: Iterable[str]) -> Message:
    """What the pieces add up to, without ids of calls, and with all warnings as one."""
    parser, found = make_parser(shape.tools, shape.reasoning, recorded.SCHEMAS, has_begun=shape.has_begun), Message()
    for events in (*map(parser.feed, pieces), parser.finish()):
        for event in events:
            found.add(event)
    for call in found.calls:
        call.call_id = ""
    found.warnings = ["; ".join(found.warnings)] if found.warnings else []
    return found


def in_two(whole: bytes) -> Iterator[list[str]]:
    """A text cut in two at every byte: a character comes with its last byte."""
    for place in range(1, len(whole)):
        decoder = codecs.getincrementaldecoder("utf-8")()
        yield [decoder.decode(whole[:place]), decoder.decode(whole[place:])]


@pytest.mark.parametrize("name", recorded.names())
def test_every_cut_gives_the_message(name: str) -> None:
    shapes = recorded.shapes(name)
    assert len(shapes) >= NUM_SHAPES
    for shape in shapes:
        assert message(shape, [shape.output]) == shape.message, shape.title
        assert message(shape, shape.output) == shape.message, shape.title
        for pieces in in_two(shape.output.encode()):
            assert message(shape, pieces) == shape.message, (shape.title, pieces)


def test_every_file_is_of_a_format() -> None:
    assert sorted(path.stem for path in recorded.FOLDER.iterdir()) == sorted(recorded.names())
