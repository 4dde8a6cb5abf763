"""A choice's text from its tokens: detokenizer and stop strings together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.text.detokenizer import ChoiceText
from tests.text.samples import make_tokenizer

TOKENIZER = make_tokenizer("byte_level")
EOS = 2


def run(text: ChoiceText, ids: list[int]) -> tuple[str, str | None]:
    emitted = "".join(text.push(token_id).text for token_id in ids)
    return emitted + text.finish(), text.matched


def test_a_stop_string_that_straddles_tokens_and_characters() -> None:
    ids = TOKENIZER.encode("a dog 世界 sleeps")
    assert run(ChoiceText(TOKENIZER, ["g 世界"]), ids) == ("a do", "g 世界")


def test_silent_tokens_have_no_text_even_if_they_are_words() -> None:
    stop_token = TOKENIZER.encode("x")[0]
    ids = [*TOKENIZER.encode("dog"), stop_token, EOS]
    assert run(ChoiceText(TOKENIZER, silent_token_ids=[stop_token, EOS]), ids) == ("dog", None)


def test_what_was_held_back_comes_at_the_end() -> None:
    ids = TOKENIZER.encode("see the")
    choice = ChoiceText(TOKENIZER, ["the end"])
    assert "".join(choice.push(token_id).text for token_id in ids) == "see "
    assert choice.finish() == "the"


def test_an_unfinished_character_at_the_end_is_shown() -> None:
    ids = TOKENIZER.encode("€")
    assert len(ids) == 3
    assert run(ChoiceText(TOKENIZER), ids[:2]) == ("\ufffd", None)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 410), max_size=40), stop=st.lists(st.text("the dog", min_size=1, max_size=3), max_size=3))
def test_a_replayed_history_gives_the_same_text_token_by_token(ids: list[int], stop: list[str]) -> None:
    first, second = ChoiceText(TOKENIZER, stop), ChoiceText(TOKENIZER, stop)
    assert [first.push(token_id) for token_id in ids] == [second.push(token_id) for token_id in ids]
    if not stop:
        assert run(ChoiceText(TOKENIZER), ids) == (TOKENIZER.decode(ids), None)
