"""Stop strings: the first to be complete ends the text, however the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.text.stop_strings import StopChecker


def run(stop: list[str], pieces: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(stop)
    text = "".join(checker.push(piece).text for piece in pieces)
    return text + checker.flush(), checker.matched


def expected(stop: list[str], text: str) -> tuple[str, str | None]:
    """The rule by brute force: the first end; there, the longest."""
    for end in range(1, len(text) + 1):
        complete = [word for word in stop if text[:end].endswith(word)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


# A small alphabet makes overlaps likely.
WORDS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text("abc", max_size=6), max_size=10)


@settings(max_examples=500, deadline=None)
@given(stop=WORDS, pieces=PIECES)
def test_result_is_the_rule_and_does_not_depend_on_grouping(stop: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert run(stop, pieces) == run(stop, list(text)) == run(stop, [text]) == expected(stop, text)


@settings(max_examples=300, deadline=None)
@given(stop=WORDS, pieces=PIECES)
def test_only_what_may_begin_a_stop_string_is_held_back(stop: list[str], pieces: list[str]) -> None:
    checker, emitted, read = StopChecker(stop), "", ""
    for piece in pieces:
        emitted, read = emitted + checker.push(piece).text, read + piece
        if checker.matched is not None:
            return
        begun = [read[start:] for start in range(len(read)) if any(word.startswith(read[start:]) for word in stop)]
        assert emitted + (begun[0] if begun else "") == read


def test_across_pieces() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.push("Hello\n").text == "Hello"
    assert checker.push("world\n\nUs").text == "\nworld"
    assert checker.push("er: more") == ("", "\n\nUser:")
    assert checker.push("and more") == ("", "\n\nUser:")
    assert checker.flush() == ""


def test_a_tie_goes_to_the_longest() -> None:
    assert run(["END", "THE END"], ["THE END"]) == ("", "THE END")


def test_a_short_one_inside_a_longer_one_that_is_complete_first_wins() -> None:
    assert run(["bcdef", "cd"], ["abcdef"]) == ("ab", "cd")


def test_no_stop_strings_pass_everything_at_once() -> None:
    assert StopChecker([]).push("anything") == ("anything", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        StopChecker(["a", ""])
