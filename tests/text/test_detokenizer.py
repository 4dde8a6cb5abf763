"""Text of a stream of tokens is the text of the list of tokens, whatever the tokens."""

from __future__ import annotations

import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from pdmesh.text.detokenizer import IncrementalDetokenizer, byte_level_bytes
from pdmesh.text.tokenizer import Tokenizer, TokenizerSettings
from tests.text.samples import BACKENDS, byte_fallback_backend, make_tokenizer

TOKENIZERS = {kind: make_tokenizer(kind) for kind in BACKENDS}
# Beyond every vocabulary, too: such ids have no text.
BYTE_IDS = {
    byte_level_bytes(piece)[0]: token_id
    for token_id in range(3, 400)
    if len(piece := TOKENIZERS["byte_level"].piece(token_id) or "") == 1
}
TOKEN_IDS = st.lists(st.integers(0, 450), max_size=40)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=300, deadline=None)
@given(ids=TOKEN_IDS)
def test_random_ids_join_to_the_decoded_list(kind: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_survives(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24))
def test_random_bytes_as_bytes_of_both_kinds(data: bytes) -> None:
    """Bytes alone, valid and not: where UTF-8 decoders differ, this shows it."""
    level, fallback = TOKENIZERS["byte_level"], TOKENIZERS["byte_fallback"]
    level_ids = [BYTE_IDS[byte] for byte in data]
    assert "".join(stream(level, level_ids)) == level.decode(level_ids) == data.decode(errors="replace")
    fallback_ids = [3 + byte for byte in data]
    assert "".join(stream(fallback, fallback_ids)) == fallback.decode(fallback_ids)


def test_a_character_comes_out_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert stream(tokenizer, tokenizer.encode("€")) == ["", "", "€", ""]


def test_a_run_of_byte_tokens_comes_out_when_it_ends() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    run = [3 + byte for byte in "👍".encode()]
    the = tokenizer.encode("the")[-1]
    assert stream(tokenizer, [*run, the]) == ["", "", "", "", "👍 the", ""]
    assert stream(tokenizer, run) == ["", "", "", "", "👍"]
    assert stream(tokenizer, run[:2]) == ["", "", "\ufffd\ufffd"]


def test_only_the_first_space_of_a_text_is_dropped() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode("the dog the", add_special_tokens=False)
    assert stream(tokenizer, ids) == ["the", " dog", " the", ""]
    assert [tokenizer.token_text(token_id) for token_id in ids] == [" the", " dog", " the"]


def test_special_tokens_have_no_text_and_added_ones_do() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("<|im_start|>the<think now><|im_end|>")
    assert "".join(stream(tokenizer, ids)) == "the<think now>"


def test_the_cost_of_a_token_does_not_grow() -> None:
    """The last tenth of a long output takes about as long as the first: a quadratic detokenizer would be 10 times slower."""
    detokenizer = IncrementalDetokenizer(TOKENIZERS["byte_level"])
    ids = TOKENIZERS["byte_level"].encode("the quick brown fox " * 1500)
    piece = len(ids) // 10

    def spend(some: list[int]) -> float:
        started = time.process_time()
        for token_id in some:
            detokenizer.push(token_id)
        return time.process_time() - started

    spends = [spend(ids[start : start + piece]) for start in range(0, 10 * piece, piece)]
    assert min(spends[-3:]) < 5 * max(spends[:3])


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "'WordPiece'"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "'Replace' behind"),
        (decoders.Replace(tokenizers.Regex("a+"), "b"), "Regex"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "'Strip' behind"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(decoder: decoders.Decoder, named: str) -> None:
    backend = byte_fallback_backend()
    backend.decoder = decoder
    with pytest.raises(ValueError, match=named):
        Tokenizer(backend, TokenizerSettings())
