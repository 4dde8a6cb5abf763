"""Long texts have the tokens that the `tokenizers` library gives, whichever library encodes them."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.models.catalogue import SMOLLM2, TINYLLAMA, cache_folder, is_complete
from pdmesh.text.long_text_encoder import GPT2_PATTERN, LongTextEncoder, first_difference, make_encoder, probes, spelled_out
from pdmesh.text.tokenizer import Tokenizer
from tests.text.samples import byte_fallback_backend, byte_level_backend, make_tokenizer

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
O200K_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
LAST_SURROGATE, NUM_CODE_POINTS = 0xDFFF, 0x110000


def backend_with(pattern: str | None) -> tokenizers.Tokenizer:
    """A byte-level vocabulary behind a pattern; None: behind the one that is built in."""
    source = json.loads(byte_level_backend().to_str())
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    return tokenizers.Tokenizer.from_str(json.dumps(source))


def digits_backend() -> tokenizers.Tokenizer:
    """Digits one by one, then the byte level: SmolLM2's way."""
    source = json.loads(byte_level_backend().to_str())
    digits = {"type": "Digits", "individual_digits": True}
    source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, source["pre_tokenizer"]]}
    return tokenizers.Tokenizer.from_str(json.dumps(source))


BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": lambda: backend_with(None),
    "GPT-2": lambda: backend_with(GPT2_PATTERN),
    "Llama 3": lambda: backend_with(LLAMA3_PATTERN),
    "Qwen 2": lambda: backend_with(QWEN2_PATTERN),
    "o200k": lambda: backend_with(O200K_PATTERN),
    "digits": digits_backend,
    "byte fallback": byte_fallback_backend,
}


@cache
def pair(name: str) -> tuple[LongTextEncoder, Callable[[str, bool], list[int]]]:
    """A ready encoder and its reference."""
    backend = BACKENDS[name]()

    def reference(text: str, add_special_tokens: bool) -> list[int]:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    special = [token.content for token in backend.get_added_tokens_decoder().values()]
    encoder = LongTextEncoder(backend.to_str, special, reference)
    encoder.prepare()
    return encoder, reference


@pytest.mark.parametrize("name", BACKENDS)
def test_patterns_that_models_use_are_encoded_fast(name: str) -> None:
    assert pair(name)[0].is_fast


_LETTERS = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\r\t'sSdtTlL0123456789.,-_aAzZ"))
_PIECES = st.sampled_from(next(probes(["<|im_start|>", "<|endoftext|>", "<s>", "<think now>"])).split("a"))
TEXTS = st.lists(st.one_of(st.text(_LETTERS, max_size=12), _PIECES), max_size=20).map("".join)


@pytest.mark.parametrize("name", BACKENDS)
@given(text=TEXTS, special=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_text_has_the_tokens_of_the_reference(name: str, text: str, special: bool) -> None:
    encoder, reference = pair(name)
    assert encoder.encode(text, add_special_tokens=special) == reference(text, special)


@pytest.mark.parametrize("name", ["digits", "Llama 3", "o200k"])
def test_every_character_counts_as_the_same_kind(name: str) -> None:
    """A library with another Unicode would take new letters for symbols. Each stands between letters, spaces and digits, in steps
    that are coarser where nothing is assigned."""
    encoder, reference = pair(name)
    points = [*range(0xD800), *range(LAST_SURROGATE + 1, 0x32000), *range(0x32000, NUM_CODE_POINTS, 251)]
    for start in range(0, len(points), 20_000):
        text = "".join([f"a{chr(point)} {chr(point)}1{chr(point)}\n" for point in points[start : start + 20_000]])
        assert encoder.encode(text, add_special_tokens=False) == reference(text, False), f"U+{points[start]:X} and later"


@pytest.mark.real_model
@pytest.mark.parametrize("model", [SMOLLM2, TINYLLAMA], ids=lambda model: model.name)
def test_real_tokenizers_are_encoded_fast_and_alike(model: SimpleNamespace) -> None:
    folder = cache_folder() / "models" / model.name
    if not is_complete(folder, model.sha256):
        pytest.skip(f"{model.name} is not in the cache")
    tokenizer = Tokenizer.load(folder)
    tokenizer.long_texts.prepare()
    assert tokenizer.long_texts.is_fast
    source = json.__doc__ or ""
    for text in (*probes(list(tokenizer.special_tokens)), source * 20):
        for special in (False, True):
            assert tokenizer.encode_detached(text, add_special_tokens=special) == tokenizer.encode(
                text, add_special_tokens=special
            )


def test_many_threads_get_the_same_tokens() -> None:
    tokenizer, text, wrong = make_tokenizer("byte_level"), "the quick brown fox 123\n" * 500, list[int]()
    expected = tokenizer.encode(text)

    def encode() -> None:
        for _ in range(20):
            if tokenizer.encode_detached(text) != expected:
                wrong.append(1)

    threads = [threading.Thread(target=encode) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    tokenizer.long_texts.prepare()
    assert tokenizer.encode_detached(text) == expected


def test_half_a_surrogate_pair_is_refused_by_the_reference() -> None:
    tokenizer = make_tokenizer("byte_level")
    tokenizer.long_texts.prepare()
    with pytest.raises(ValueError, match="Unicode"):
        tokenizer.encode_detached("\ud800")
    assert tokenizer.long_texts.is_fast


class Panic(BaseException):
    """As a panic of Rust arrives: it is no Exception."""


class Stub:
    """An encoder that gives other tokens, or fails."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        if self._error is not None:
            raise self._error
        return SimpleNamespace(ids=[len(text), int(add_special_tokens)])


def _bytes(text: str, add_special_tokens: bool) -> list[int]:
    return [*text.encode()]


def test_an_encoder_with_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=lambda _: Stub())))
    with caplog.at_level(logging.WARNING):
        assert make_encoder(byte_level_backend().to_str, (), _bytes) is None
    assert "gives other tokens for" in caplog.text
    assert first_difference(Stub(), (), _bytes) == next(probes(()))


@pytest.mark.parametrize("error", [ValueError("a pattern"), Panic("at src/lib.rs")])
def test_a_tokenizer_that_cannot_be_read_is_encoded_by_the_reference(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refuse(_: str) -> Stub:
        raise error

    monkeypatch.setitem(sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=refuse)))
    assert make_encoder(byte_level_backend().to_str, (), _bytes) is None


def test_without_the_library_the_reference_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer = make_tokenizer("byte_level")
    tokenizer.long_texts.prepare()
    assert not tokenizer.long_texts.is_fast
    assert tokenizer.encode_detached("the dog") == tokenizer.encode("the dog")


@pytest.mark.parametrize("error", [RuntimeError("match limit"), Panic("index out of bounds")])
def test_a_text_at_which_it_fails_is_encoded_by_the_reference(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    encoder = LongTextEncoder(byte_level_backend().to_str, (), _bytes)
    encoder.prepare()
    encoder._encoder = Stub(error)
    assert encoder.encode("abc", add_special_tokens=False) == [97, 98, 99]
    assert not encoder.is_fast
    assert "fastokens failed at a text of 3 characters" in caplog.text


def test_other_tokenizers_stay_as_they_are() -> None:
    for source in (byte_fallback_backend().to_str(), backend_with(LLAMA3_PATTERN).to_str()):
        assert spelled_out(source) == source
    prefixed = json.loads(byte_level_backend().to_str())
    prefixed["pre_tokenizer"]["add_prefix_space"] = True
    assert spelled_out(json.dumps(prefixed)) == json.dumps(prefixed)
    assert GPT2_PATTERN in json.dumps(json.loads(spelled_out(byte_level_backend().to_str()))).replace("\\\\", "\\")
