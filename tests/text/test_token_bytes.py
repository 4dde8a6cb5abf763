"""The longest text of one token: an upper bound for any text, or none where it cannot be proved."""

from __future__ import annotations

from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from pdmesh.text.tokenizer import NFC_SHRINKS, TokenBytes, token_bytes
from tests.text.samples import byte_fallback_backend, byte_level_backend, make_tokenizer, plain_backend

TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" thedog\u0301\u212a世")), max_size=200)
_CANNOT_SPELL = tokenizers.Tokenizer.from_str(byte_level_backend().to_str().replace('"Ā"', '"<a>"').replace('"Ą"', '"<b>"'))
KINDS = ("byte_level", "byte_fallback")
tokenizer_of = cache(make_tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_no_text_has_fewer_tokens_than_its_bytes_allow(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    fewest = tokenizer.fewest_tokens(text)
    assert len(tokenizer.encode(text)) >= fewest
    assert bool(fewest) == bool(text)


@given(text=st.text(st.sampled_from("\x00\x04 thedog\u2028é"), max_size=200))
@settings(max_examples=100, deadline=None)
def test_bytes_that_the_vocabulary_cannot_spell_do_not_count(text: str) -> None:
    known = token_bytes(_CANNOT_SPELL.to_str())
    assert known is not None
    assert known.silent == b"\x00\x04"
    assert len(_CANNOT_SPELL.encode(text).ids) >= known.fewest_tokens(text)


def test_fewest_tokens_rounds_up() -> None:
    assert [TokenBytes(3, b"x").fewest_tokens(text) for text in ("", "x", "a", "axbxcx", "abcd", "ééé")] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_detached_encoding_is_the_same(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    for special in (False, True):
        assert tokenizer.encode_detached(text, add_special_tokens=special) == tokenizer.encode(text, add_special_tokens=special)


def test_detached_encoding_refuses_half_a_surrogate_pair() -> None:
    with pytest.raises(ValueError, match="Unicode"):
        make_tokenizer("byte_level").encode_detached("\ud800")


def test_the_longest_counts_added_tokens() -> None:
    backend = byte_level_backend()
    backend.add_tokens([tokenizers.AddedToken("ü" * 40, normalized=False)])
    assert token_bytes(backend.to_str()) == TokenBytes(80)


def test_composition_shortens_a_text_by_a_bounded_factor() -> None:
    plain, composing = byte_level_backend(), byte_level_backend()
    composing.normalizer = normalizers.NFC()
    known = token_bytes(plain.to_str())
    assert known is not None
    assert token_bytes(composing.to_str()) == TokenBytes(NFC_SHRINKS * known.longest)


def _without_a_byte() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(byte_fallback_backend().to_str().replace('"<0x41>"', '"<0xXX>"'))


def _with(**parts: object) -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def _that_makes_silent_ones() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(_CANNOT_SPELL.to_str())
    backend.normalizer = normalizers.Replace("a", "\x04")
    return backend


def _with_greedy_token() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        plain_backend(),
        _without_a_byte(),
        _with_greedy_token(),
        _that_makes_silent_ones(),
        _with(normalizer=normalizers.Strip()),
        _with(normalizer=normalizers.Replace("aaaa", "a")),
        _with(normalizer=normalizers.Replace(tokenizers.Regex("a+"), "a")),
        _with(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])),
        _with(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])),
        _with(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])),
    ],
)
def test_what_cannot_be_proved_has_no_bound(backend: tokenizers.Tokenizer) -> None:
    assert token_bytes(backend.to_str()) is None
