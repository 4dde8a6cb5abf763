"""Random outputs: nothing is raised and no text is lost. `make fuzz-parsers` checks a hundred thousand and more."""

from __future__ import annotations

import random

import pytest

from pdmesh.text.parsers.events import Content
from tests.text.parsers import fuzz

NUM_STREAMS = 2000


def test_random_outputs_lose_no_text() -> None:
    rng = random.Random(7)
    for _ in range(NUM_STREAMS):
        stream = fuzz.drawn(rng)
        fuzz.check(stream)
        fuzz.check_constrained(stream)


@pytest.mark.parametrize(("tools", "lost"), [("hermes", "</think>"), ("hermes", "</tool_call>"), ("harmony", "<|end|>")])
def test_the_check_sees_a_lost_mark_that_stands_around_nothing(tools: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ("one<|end|>" if tools == "harmony" else "one", lost, "two")
    stream = fuzz.Stream(tools, "think", has_begun=False, tokens=tuple(token.encode() for token in tokens))
    fuzz.check(stream)
    monkeypatch.setattr(fuzz, "events_of", lambda stream, pieces: [Content("onetwo")])
    with pytest.raises(AssertionError, match="lost"):
        fuzz.check(stream)


@pytest.mark.parametrize(
    "text", ['{"a":"</think>"}', "a</think>b", " a <think> b</think>\n", '{"name": "stop", "arguments": {}}']
)
@pytest.mark.parametrize("before", ["", "<think>So.</think>\n\n"])
def test_a_constrained_answer_is_what_stands_behind_thoughts(before: str, text: str) -> None:
    for tools in ("none", "hermes", "json"):
        stream = fuzz.Stream(tools, "think", has_begun=False, tokens=((before + text).encode(),))
        fuzz.check_constrained(stream)
        assert fuzz.message_of(fuzz.events_of(stream, [before + text], is_constrained=True)).content == text


@pytest.mark.parametrize("lost", [b"\xce\xb1", b"say"])
def test_the_check_sees_what_is_lost(lost: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = fuzz.Stream("hermes", "think", has_begun=False, tokens=(b"<think>so</think>", lost, b"<tool_call>no"))
    fuzz.check(stream)
    monkeypatch.setattr(fuzz, "events_of", lambda stream, pieces: [])
    with pytest.raises(AssertionError, match="lost"):
        fuzz.check(stream)
