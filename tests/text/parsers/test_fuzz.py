"""Random outputs: nothing is raised and no text is lost. `make fuzz-parsers` checks a hundred thousand and more."""

from __future__ import annotations

import random

import pytest

from tests.text.parsers import fuzz

NUM_STREAMS = 2000


def test_random_outputs_lose_no_text() -> None:
    rng = random.Random(7)
    for _ in range(NUM_STREAMS):
        fuzz.check(fuzz.drawn(rng))


@pytest.mark.parametrize("lost", [b"\xce\xb1", b"say"])
def test_the_check_sees_what_is_lost(lost: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = fuzz.Stream("hermes", "think", has_begun=False, tokens=(b"<think>so</think>", lost, b"<tool_call>no"))
    fuzz.check(stream)
    monkeypatch.setattr(fuzz, "events_of", lambda stream, pieces: [])
    with pytest.raises(AssertionError, match="lost"):
        fuzz.check(stream)
