"""Encoding of long texts by `fastokens`, an encoder for byte-pair vocabularies in Rust that takes a fourth to a sixtieth of the
time of the `tokenizers` library.

`tokenizers` is the reference, and stays in use for short texts and wherever its tokens are not given in return:

    fastokens cannot be imported, or cannot read the tokenizer      never used
    it gives other tokens for the probes                            never used; a warning names the first that differs
    it fails at a text (a limit of its regular expressions)         that text, and all later ones, by the reference

It is made by the call with the first long text, which takes up to a second longer for a large vocabulary; the reference encodes
what other threads bring meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

logger = logging.getLogger(__name__)

ONE_THREAD = {"FASTOKENS_BPE_THREADS": "1"}
"""What the library reads when it is imported: the caller's thread encodes alone. The other cores are the workers'."""

Encode = Callable[[str, bool], list[int]]
"""Return the token ids of a text; with the tokens that the model wants around every text, or without."""

# What the byte level of `tokenizers` has built in. Where it is said, fastokens knows it, and takes half of the time.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

NUM_PROBES, PROBE_PIECES, PROBE_ADDED = 24, 50, 10
MOST_ADDED = 1000
_PIECES = (
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n", "\n "),
    *("\u00a0", "\u2003", "\u3000", "\u2028", "\x85", "\x0b", "\x1c"),
    *("the", " The", "SHOUT", "camelCase", "snake_case", "naïve", "Straße", "İstanbul", "ﬁne", "e\u0301", "Å"),
    *("\u200b", "\u200d", "\ufeff", "\u0000", "\x07", "\x7f", "\ue000", "\U0010ffff", "�"),
    *("'s", "'S", "'ll", "'LL", "’s", "don't", "it'd", "'", '"', "''"),
    *("--", "...", "!?", "#!", "<|", "|>", "</", "[INST]", "{}", "\\n", "$", "€"),
    *("0", "7", " 42", "123", "1234", "1234567890", "3.14", "1,000", "½", "٣٤", "Ⅻ", "²", "0x1F", "v2", "2nd"),
    *("你好，世界", "こんにちは", "カタカナ", "한국어", "ไทย", "हिन्दी", "العربية", "עברית"),
    *("Ελλάδα", "кириллица", "ქართული", "አማርኛ", "𓀀", "𝔘𝔫𝔦"),
    *("🙂", "👩‍👩‍👧‍👦", "🇨🇭", "👍🏽"),
    *("a" * 70, "=" * 80, "ab" * 40, " " * 33, "\n" * 9, "-" * 17),
    *("def f(x):\n    return x**2  # square\n", "https://example.org/a?b=c&d=%20#e"),
    *('{"key": [1, 2, null]}', "x = [i for i in range(10)]"),
)  # fmt: skip


class Encoder(Protocol):
    """What is used of `fastokens.Tokenizer`."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Return an object with `ids`."""


class LongTextEncoder:
    """Encode long texts: as the reference does, and faster where that is possible. Thread-safe."""

    def __init__(self, tokenizer_json: Callable[[], str], added_texts: Sequence[str], reference: Encode) -> None:
        """`tokenizer_json` returns the whole tokenizer; it is called once. `added_texts`: of all tokens that were added to its
        vocabulary, special or not."""
        self._make = partial(make_encoder, tokenizer_json, added_texts, reference)
        self._reference = reference
        self._encoder: Encoder | None = None
        self._is_made = False
        self._lock = threading.Lock()

    @property
    def is_fast(self) -> bool:
        """Return whether the next text is encoded by fastokens."""
        return self._encoder is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids. Raises what the reference raises."""
        self.prepare()
        encoder = self._encoder
        if encoder is not None:
            try:
                return list(encoder.encode(text, add_special_tokens=add_special_tokens).ids)
            except UnicodeEncodeError:
                pass  # the reference says what is wrong with it
            except BaseException as error:  # a panic of Rust is no Exception
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                self._encoder = None
                logger.exception("fastokens failed at a text of %d characters; tokenizers takes its place", len(text))
        return self._reference(text, add_special_tokens)

    def prepare(self) -> None:
        """Make the fast encoder, once in this object's life. Returns at once while another thread does."""
        if self._is_made or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._is_made:
                self._encoder, self._is_made = self._make(), True
        finally:
            self._lock.release()


def make_encoder(tokenizer_json: Callable[[], str], added_texts: Sequence[str], reference: Encode) -> Encoder | None:
    """Return a fast encoder that was seen to give the reference's tokens; None where there is none."""
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    try:
        from fastokens import Tokenizer
    except ImportError as error:
        logger.info("long texts are encoded by tokenizers: fastokens cannot be imported (%s)", error)
        return None
    try:
        encoder: Encoder = Tokenizer.from_json_str(spelled_out(tokenizer_json()))
        if (probe := first_difference(encoder, added_texts, reference)) is not None:
            logger.warning("long texts are encoded by tokenizers: fastokens gives other tokens for %r", probe)
            return None
    except BaseException as error:  # noqa: BLE001 - a panic of Rust is no Exception
        logger.info("long texts are encoded by tokenizers: fastokens does not read this tokenizer (%s)", error)
        return None
    return encoder


def first_difference(encoder: Encoder, added_texts: Sequence[str], reference: Encode) -> str | None:
    """Return the first probe for which the tokens differ; None: all are equal."""
    for probe in probes(added_texts):
        for add_special_tokens in (False, True):
            if list(encoder.encode(probe, add_special_tokens=add_special_tokens).ids) != reference(probe, add_special_tokens):
                return probe
    return None


def probes(added_texts: Sequence[str]) -> Iterator[str]:
    """Yield texts of what encoders disagree about: spaces, apostrophes, digits, scripts, marks, controls, added tokens."""
    draw = random.Random(0)
    yield "".join((*_PIECES, *added_texts[:MOST_ADDED]))
    yield " ".join(("a", *added_texts[:MOST_ADDED], "b"))
    for _ in range(NUM_PROBES):
        added = draw.sample(added_texts, min(len(added_texts), PROBE_ADDED))
        pieces = [*draw.choices(_PIECES, k=PROBE_PIECES), *added]
        draw.shuffle(pieces)
        yield "".join(pieces)


def spelled_out(tokenizer_json: str) -> str:
    """Return the same tokenizer, with GPT-2's pattern said where the byte level has it built in. Pure."""
    source = json.loads(tokenizer_json)
    before = source.get("pre_tokenizer")
    if before is None:
        return tokenizer_json
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    said = [inner for step in steps for inner in _spelled_out_step(step)]
    if len(said) == len(steps):
        return tokenizer_json
    return json.dumps({**source, "pre_tokenizer": {"type": "Sequence", "pretokenizers": said}})


def _spelled_out_step(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if step["type"] != "ByteLevel" or not step.get("use_regex", True) or step.get("add_prefix_space", True):
        return [step]
    split = {"type": "Split", "pattern": {"Regex": GPT2_PATTERN}, "behavior": "Isolated", "invert": False}
    return [split, {**step, "use_regex": False}]
