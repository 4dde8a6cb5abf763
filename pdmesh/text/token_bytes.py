"""How many bytes of text one token can stand for at most: a text that is longer than the context times this cannot fit.

Answered only where it can be proved from tokenizer.json: no step may drop an unknown part, or shorten a text without limit.
Byte-level BPE and BPE with byte fallback, which is nearly every model, can be proved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdmesh.text.decoder_stages import byte_spelling

# Of NFC. A character (4 bytes at most) decomposes into 1 byte or more, and a composed text has at least a third of the bytes of
# its decomposition (Unicode's FAQ on normalization, expansion of NFD in UTF-8).
NFC_SHRINKS = 12

_KEEPING_SPLITS = frozenset(("Digits", "Metaspace", "ByteLevel", "UnicodeScripts"))

Part = Mapping[str, Any]


@dataclass(frozen=True)
class TokenBytes:
    """`longest`: bytes that one token stands for at most. `silent`: bytes that the vocabulary cannot spell and drops."""

    longest: int
    silent: bytes = b""

    def fewest_tokens(self, text: str) -> int:
        """`text` has at least so many tokens."""
        return -(-len(text.encode().translate(None, self.silent)) // self.longest)


def token_bytes(tokenizer_json: str) -> TokenBytes | None:
    """Of a tokenizer.json; None where nothing can be proved."""
    source = json.loads(tokenizer_json)
    model, added = source["model"], source.get("added_tokens") or []
    normalizers, splits = list(_steps(source.get("normalizer"))), list(_steps(source.get("pre_tokenizer")))
    factors = [_shrinks(step) for step in normalizers]
    if model.get("type") != "BPE" or None in factors or not all(_keeps_all(step) for step in splits):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):  # it swallows any number of spaces
        return None
    by_byte = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
    silent = _silent(model, by_byte=by_byte)
    if silent is None or (
        silent and any(step["type"] != "ByteLevel" for step in normalizers)
    ):  # it may make silent ones of others
        return None
    pieces = (len(piece) if by_byte else len(piece.encode()) for piece in model["vocab"])
    longest = max((*pieces, *(len(token["content"].encode()) for token in added)))
    return TokenBytes(math.prod((longest, *(factor or 1 for factor in factors))), silent)


def _steps(part: Part | None) -> Iterator[Part]:
    """A normalizer or pre-tokenizer as the plain ones in it."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _steps(inner)


def _shrinks(step: Part) -> int | None:
    """How many times shorter a normalizer can make a text, in bytes; None: without limit, or unknown."""
    kind = step["type"]
    if kind in ("Prepend", "ByteLevel"):
        return 1
    if kind == "NFC":
        return NFC_SHRINKS
    if kind == "Replace" and "String" in step["pattern"]:
        return 1 if len(step["content"].encode()) >= len(step["pattern"]["String"].encode()) else None
    return None


def _keeps_all(step: Part) -> bool:
    """Whether a pre-tokenizer hands on all of the text."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING_SPLITS


def _silent(model: Part, *, by_byte: bool) -> bytes | None:
    """Bytes without a token of their own, which are dropped or run together; None: that may happen to any text."""
    vocab = model["vocab"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):  # a byte may be known in one place only
        return None
    if by_byte:
        return bytes(byte for letter, byte in byte_spelling().items() if letter not in vocab)
    spelled = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return b"" if spelled else None
