"""Converts token ids to text incrementally, one token at a time."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from pdmesh.text.stop_strings import StopChecker, StopResult

# Decoders of `tokenizer.json` as transducers: one token in, the final text out.
#
# `tokenizers` decodes whole lists. Its decoders are chains of steps from a list of tokens to a list of strings; each step here
# does the same for a stream, holding back only what a later token could still change, so that the joined pieces are exactly the
# decoded list. Two kinds cover the models of this project:
#
#     byte-level BPE (Llama 3, Qwen, SmolLM)   ByteLevel: holds back at most three bytes, the beginning of a character
#     SentencePiece BPE (Llama 2, TinyLlama)   Replace, ByteFallback, Fuse, Strip: holds back a run of `<0x..>` tokens until it
#                                              ends, because one invalid byte turns the whole run into U+FFFD
#
# Source of the semantics: the decoders of the Rust crate `tokenizers` 0.23. Not covered: WordPiece, BPEDecoder, CTC, Strip at the
# end of a fused text, Replace by a regular expression; they are rejected when the tokenizer is loaded.


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"


class Stage(Protocol):
    """Transform one stream by one step of a decoder."""

    def push(self, piece: str) -> Sequence[str]:
        """Return the final text after one more piece."""

    def flush(self) -> Sequence[str]:
        """Return what was held back, at the end of the stream."""


class ByteLevel:
    """Decode GPT-2's spelling of bytes as printable characters; all tokens together are one UTF-8 text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between_characters = True

    def push(self, piece: str) -> Sequence[str]:
        whole = byte_level_text(piece) if self._is_between_characters else None
        if whole is not None:  # most tokens: a look-up without decoding
            return whole
        text = self._decoder.decode(byte_level_bytes(piece))
        self._is_between_characters = not self._decoder.getstate()[0]
        return (text,)

    def flush(self) -> Sequence[str]:
        return (self._decoder.decode(b"", final=True),)


class ByteFallback:
    """Decode `<0xE2>` as a byte. A run of them is one text if it is valid UTF-8, else one U+FFFD per byte."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> Sequence[str]:
        match = _BYTE_TOKEN.fullmatch(piece)
        if match is not None:
            self._run.append(int(match[1], 16))
            return ()
        return (*self.flush(), piece)

    def flush(self) -> Sequence[str]:
        if not self._run:
            return ()
        run, self._run = bytes(self._run), bytearray()
        try:
            return (run.decode(),)
        except UnicodeDecodeError:
            return (REPLACEMENT * len(run),)


class Replace:
    """Replace a string within each piece."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def push(self, piece: str) -> Sequence[str]:
        return (piece.replace(self._pattern, self._content),)

    def flush(self) -> Sequence[str]:
        return ()


class StripPiece:
    """Remove up to `start` leading and `stop` trailing characters `content` of each piece."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop

    def push(self, piece: str) -> Sequence[str]:
        first = _count_leading(piece, self._content, self._start)
        last = len(piece) - _count_leading(piece[::-1], self._content, self._stop)
        return (piece[first:last],) if first < last else ("",)

    def flush(self) -> Sequence[str]:
        return ()


class StripStart:
    """Remove up to `start` leading characters `content` of the whole text."""

    def __init__(self, content: str, start: int) -> None:
        self._content, self._left = content, start

    def push(self, piece: str) -> Sequence[str]:
        if not self._left or not piece:
            return (piece,)
        num_stripped = _count_leading(piece, self._content, self._left)
        self._left = self._left - num_stripped if num_stripped == len(piece) else 0
        return (piece[num_stripped:],)

    def flush(self) -> Sequence[str]:
        return ()


class Metaspace:
    """Replace the visible character for a space; in the first piece it is dropped, if the tokenizer had put it there."""

    def __init__(self, replacement: str, drop_first: bool) -> None:
        self._replacement, self._drop = replacement, drop_first

    def push(self, piece: str) -> Sequence[str]:
        space = "" if self._drop else " "
        self._drop = False
        return (piece.replace(self._replacement, space),)

    def flush(self) -> Sequence[str]:
        return ()


class Join:
    """Separate tokens by spaces, where there is no decoder."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, piece: str) -> Sequence[str]:
        text, self._separator = self._separator + piece, " "
        return (text,)

    def flush(self) -> Sequence[str]:
        return ()


StageFactory = Callable[[], Stage]


def parse_decoder(config: Mapping[str, object] | None) -> list[StageFactory]:
    """Return makers of the stages of a `decoder` entry of a tokenizer.json. Raises ValueError naming a decoder that is not
    covered."""
    if config is None:
        return [Join]
    steps = config["decoders"] if config["type"] == "Sequence" else [config]
    if not isinstance(steps, list):
        raise ValueError("tokenizer.json: decoder.decoders is not a list")
    factories: list[StageFactory] = []
    fused = False
    for step in steps:
        factories += _parse_step(step, fused)
        fused = fused or step["type"] in ("Fuse", "ByteLevel")
    for factory in factories:
        factory()  # a bad parameter fails now, not with the first token
    return factories


def _parse_step(step: Mapping[str, object], fused: bool) -> list[StageFactory]:
    kind = step["type"]
    # After Fuse or ByteLevel the library sees one long string, so only steps on a stream's beginning are possible.
    if kind == "Strip" and fused and not _count(step, "stop"):
        return [lambda: StripStart(str(step["content"]), _count(step, "start"))]
    if kind == "Fuse" or fused:
        if kind == "Fuse":
            return []
        raise ValueError(f"tokenizer.json: decoder {kind!r} behind 'Fuse' or 'ByteLevel' is not supported")
    maker = _PIECEWISE.get(str(kind))
    if maker is None:
        raise ValueError(
            f"tokenizer.json: decoder {kind!r} is not supported; supported are {', '.join(_PIECEWISE)}, Fuse, Sequence"
        )
    return [lambda: maker(step)]


def _make_replace(step: Mapping[str, object]) -> Stage:
    pattern = step["pattern"]
    if not isinstance(pattern, dict) or "String" not in pattern:
        raise ValueError(f"tokenizer.json: decoder 'Replace' with pattern {pattern!r} is not supported; a plain string is")
    return Replace(pattern["String"], str(step["content"]))


_PIECEWISE: dict[str, Callable[[Mapping[str, object]], Stage]] = {
    "ByteLevel": lambda step: ByteLevel(),
    "ByteFallback": lambda step: ByteFallback(),
    "Replace": _make_replace,
    "Strip": lambda step: StripPiece(str(step["content"]), _count(step, "start"), _count(step, "stop")),
    "Metaspace": lambda step: Metaspace(str(step["replacement"]), step.get("prepend_scheme", "always") != "never"),
}


def _count(step: Mapping[str, object], name: str) -> int:
    value = step[name]
    if not isinstance(value, int):
        raise ValueError(f"tokenizer.json: decoder {step['type']!r}: {name} is {value!r}, not a number")
    return value


def _count_leading(text: str, content: str, limit: int) -> int:
    count = 0
    while count < min(limit, len(text)) and text[count] == content:
        count += 1
    return count


def byte_spelling() -> dict[str, int]:
    """Return GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


BYTE_OF_CHARACTER = byte_spelling()


@lru_cache(maxsize=1 << 18)
def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with other characters (an added one) is its own UTF-8 bytes."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


@lru_cache(maxsize=1 << 18)
def byte_level_text(token: str) -> tuple[str] | None:
    """Return the text of a byte-level token whose bytes are whole characters; None for any other."""
    try:
        return (byte_level_bytes(token).decode(),)
    except UnicodeDecodeError:
        return None


def piece_bytes(stages: Sequence[Stage], piece: str) -> bytes | None:
    """Return the bytes that a vocabulary's `piece` stands for, where the decoder `stages` know pieces of bytes: also part of a
    character. None for a piece of text."""
    match = _BYTE_TOKEN.fullmatch(piece)
    for stage in stages:
        if isinstance(stage, ByteLevel):
            return byte_level_bytes(piece)
        if isinstance(stage, ByteFallback) and match is not None:
            return bytes((int(match[1], 16),))
    return None


class DetokenizerSource(Protocol):
    """Provide what a detokenizer needs of a tokenizer."""

    def decoder_stages(self) -> list[Stage]:
        """Return fresh stages of the tokenizer's decoder."""

    def piece(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token; None if it has no text: special or unknown."""


class VisibleMarks:
    """Show some special tokens of a tokenizer as text: marks that a parser of the output has to see."""

    def __init__(self, tokenizer: DetokenizerSource, marks: Mapping[int, str]) -> None:
        """`marks`: texts by token id."""
        self._tokenizer = tokenizer
        self._marks = marks

    def decoder_stages(self) -> list[Stage]:
        return self._tokenizer.decoder_stages()

    def piece(self, token_id: int) -> str | None:
        return self._marks.get(token_id) or self._tokenizer.piece(token_id)


class PieceStream:
    """Pass pieces of a vocabulary through a decoder's stages; `push` and `flush` return the final text."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def push(self, piece: str) -> str:
        return "".join(_feed(self._stages, (piece,)))

    def flush(self) -> str:
        behind = [self._stages[position + 1 :] for position in range(len(self._stages))]
        return "".join(text for stage, rest in zip(self._stages, behind, strict=True) for text in _feed(rest, stage.flush()))


class IncrementalDetokenizer:
    """Return the text of a growing sequence of tokens.

    All pushes and the flush joined are exactly `tokenizer.decode(ids, skip_special_tokens=True)`. A character whose bytes are
    spread over tokens appears with the last of them. The cost of a token does not depend on the number before it."""

    def __init__(self, tokenizer: DetokenizerSource) -> None:
        self._piece_of = tokenizer.piece
        stages = tokenizer.decoder_stages()
        self._stream = PieceStream(stages)
        self._only_stage = stages[0].push if len(stages) == 1 else None  # byte-level vocabularies: the per-token path

    def push(self, token_id: int) -> str:
        """Return the final text after `token_id`; often empty in the middle of a character."""
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        return self._stream.push(piece) if self._only_stage is None else "".join(self._only_stage(piece))

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence; nothing may be pushed afterwards."""
        return self._stream.flush()


def _feed(stages: Sequence[Stage], pieces: Sequence[str]) -> Sequence[str]:
    for stage in stages:
        pieces = [out for piece in pieces for out in stage.push(piece)]
    return pieces


# The text of one choice: detokenizer and stop strings together.


class ChoiceText:
    """Turn a choice's tokens into text that may be sent.

    Args:
        tokenizer: of the model.
        stop: stop strings; the output ends before the first that appears (see `pdmesh.text.stop_strings`).
        silent_token_ids: end-of-sequence and stop tokens: part of the ids, never of the text. Special tokens have no text anyway.

    It is a function of the tokens alone: a resumed stream that replays its history is in the same state."""

    def __init__(self, tokenizer: DetokenizerSource, stop: Sequence[str] = (), silent_token_ids: Collection[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopChecker(stop) if stop else None
        self._silent = frozenset(silent_token_ids)
        self.num_chars = 0  # of all text so far, also of what may not be sent yet

    @property
    def matched(self) -> str | None:
        """Return the stop string that ended the text; None while it goes on. `finish` may set it, too."""
        return None if self._stop is None else self._stop.matched

    def push(self, token_id: int) -> StopResult:
        """Return (text that may be sent with this token, the stop string that it completed or None)."""
        if token_id in self._silent:
            return StopResult("", self.matched)
        text = self._detokenizer.push(token_id)
        self.num_chars += len(text)
        return StopResult(text, None) if self._stop is None else self._stop.push(text)

    def finish(self) -> str:
        """Return what was held back, when the choice has ended; empty after a match."""
        text = self._detokenizer.flush()
        return text if self._stop is None else self._stop.push(text).text + self._stop.flush()
