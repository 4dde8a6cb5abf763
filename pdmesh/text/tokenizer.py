"""Wraps a model's tokenizer, from its folder; a thin layer over the `tokenizers` library."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pdmesh.text.chat_template import PLAIN, ChatTemplate, Message, Rendering, read_template
from pdmesh.text.detokenizer import REPLACEMENT, PieceStream, Stage, StripStart, byte_spelling, parse_decoder, piece_bytes
from pdmesh.text.generation_config import sampling_defaults
from pdmesh.text.long_text_encoder import LongTextEncoder
from pdmesh.text.parsers.registry import NONE, OTHER, PROMPTED, reasoning_format_of, tool_format_of
from pdmesh.text.tokenizer_files import add_declared, named_tokens, read_backend
from pdmesh.text.tool_prompt import with_tools

# A model folder's tokenizer settings besides tokenizer.json.


# transformers writes int(1e30) for an unknown limit of a tokenizer.
_MAX_PLAUSIBLE_CONTEXT = 1 << 40


@dataclass(frozen=True)
class TokenizerSettings:
    """Hold the facts of one model folder; 0, empty and None where the folder does not say."""

    model_type: str = ""
    vocab_size: int = 0
    max_context: int = 0
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    template_names: tuple[str, ...] = ()  # where there are several and none is the default
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    generation: Mapping[str, object] = field(default_factory=dict)  # generation_config.json, as it stands there
    folder: Path = Path()

    def sampling_defaults(self) -> dict[str, float]:
        """Return what the model's publisher set for requests that leave sampling parameters out. Raises ValueError."""
        return sampling_defaults(self.generation, self.folder)

    @classmethod
    def load(cls, folder: str | Path) -> TokenizerSettings:
        """Read the files, each of which may be missing. Raises ValueError naming one that is invalid."""
        folder = Path(folder)
        config = _read_object(folder / "config.json")
        text_config = config.get("text_config", config)  # models that see images keep their language model one level down
        if not isinstance(text_config, dict):
            raise ValueError(f"{folder / 'config.json'}: text_config is not an object")
        tokenizer_config = _read_object(folder / "tokenizer_config.json")
        special_map = _read_object(folder / "special_tokens_map.json")
        template, names = read_template(folder, tokenizer_config.get("chat_template"))
        generation_config = _read_object(folder / "generation_config.json")
        return cls(
            model_type=str(text_config.get("model_type", "")),
            vocab_size=_number(text_config.get("vocab_size")),
            max_context=_context(text_config) or _number(tokenizer_config.get("model_max_length")),
            eos_token_ids=_ids(generation_config.get("eos_token_id")) or _ids(text_config.get("eos_token_id")),
            chat_template=template,
            template_names=names,
            special_tokens={name: token.content for name, token in named_tokens(tokenizer_config, special_map).items()},
            generation=generation_config,
            folder=folder,
        )


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object")
    return value


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < _MAX_PLAUSIBLE_CONTEXT else 0


def _context(config: Mapping[str, object]) -> int:
    """Return the longest context, also of families that spell it otherwise, with what YaRN makes of it."""
    keys = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    plain = next((number for key in keys if (number := _number(config.get(key)))), 0)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return plain
    original, factor = _number(scaling.get("original_max_position_embeddings")) or plain, scaling.get("factor")
    return max(plain, int(original * factor)) if isinstance(factor, int | float) else plain


def _ids(value: object) -> tuple[int, ...]:
    """Return the ids: eos_token_id is a number, a list of them, or null."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int))


# The most bytes of text that one token can stand for: a text that is longer than the context times this cannot fit.
#
# It is known only if tokenizer.json proves it: no step may drop an unknown part, or shorten a text without limit. Byte-level BPE
# and BPE with byte fallback, which is nearly every model, can be proved.


# NFC's bound. A character (4 bytes at most) decomposes into 1 byte or more, and a composed text has at least a third of the bytes
# of its decomposition (Unicode's FAQ on normalization, expansion of NFD in UTF-8).
NFC_SHRINKS = 12

_KEEPING_SPLITS = frozenset(("Digits", "Metaspace", "ByteLevel", "UnicodeScripts"))

Part = Mapping[str, Any]


@dataclass(frozen=True)
class TokenBytes:
    """Hold bounds. `longest`: bytes that one token stands for at most. `silent`: bytes that the vocabulary cannot spell and
    drops."""

    longest: int
    silent: bytes = b""

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of `text`."""
        return -(-len(text.encode().translate(None, self.silent)) // self.longest)


def token_bytes(tokenizer_json: str) -> TokenBytes | None:
    """Return the bounds of a tokenizer.json; None where nothing can be proved."""
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
    """Yield a normalizer or pre-tokenizer as its elementary steps."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _steps(inner)


def _shrinks(step: Part) -> int | None:
    """Return how many times shorter a normalizer can make a text, in bytes; None: without limit, or unknown."""
    kind = step["type"]
    if kind in ("Prepend", "ByteLevel"):
        return 1
    if kind == "NFC":
        return NFC_SHRINKS
    if kind == "Replace" and "String" in step["pattern"]:
        return 1 if len(step["content"].encode()) >= len(step["pattern"]["String"].encode()) else None
    return None


def _keeps_all(step: Part) -> bool:
    """Return whether a pre-tokenizer passes on all of the text."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING_SPLITS


def _silent(model: Part, *, by_byte: bool) -> bytes | None:
    """Return the bytes without a token of their own, which are dropped or merged; None: that may happen to any text."""
    vocab = model["vocab"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):  # a byte may be known in one place only
        return None
    if by_byte:
        return bytes(byte for letter, byte in byte_spelling().items() if letter not in vocab)
    spelled = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return b"" if spelled else None


class Tokenizer:
    """Convert text to token ids and back, with the model's chat template. Immutable after `load`; thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        self._backend = backend
        self.settings = settings
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = backend.decoder
        self._stage_factories = parse_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self._pieces: dict[int, str] = {}  # looked up for every token of every stream
        self._token_texts: dict[int, str] = {}  # looked up often: 20 alternatives to each token, mostly the same few

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer (pdmesh/text/tokenizer_files.py) and, if present, tokenizer_config.json, special_tokens_map.json,
        added_tokens.json, chat templates, generation_config.json and config.json. Raises FileNotFoundError or ValueError naming
        the file and what is wrong with it."""
        if Path(folder).is_file():
            raise ValueError(
                f"{folder} is a file, and a tokenizer is read from a model folder; for a .gguf file, "
                "`pdmesh models fetch FILE` makes one and prints its path"
            )
        folder = Path(folder)
        settings = TokenizerSettings.load(folder)
        config = _read_object(folder / "tokenizer_config.json")
        backend = read_backend(folder, config, settings.model_type)
        special_map, added = _read_object(folder / "special_tokens_map.json"), _read_object(folder / "added_tokens.json")
        add_declared(backend, config, special_map, added, max_id=settings.vocab_size)
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, settings)

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids that the model accepts: config.json's, which may count unused rows, else the
        tokenizer's."""
        return self.settings.vocab_size or self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def max_context(self) -> int:
        """Return the most tokens of prompt and output together that the model was made for."""
        return self.settings.max_context

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the tokens that end an output."""
        if self.settings.eos_token_ids:
            return frozenset(self.settings.eos_token_ids)
        eos = self._backend.token_to_id(self.settings.special_tokens.get("eos_token", ""))
        return frozenset() if eos is None else frozenset((eos,))

    @property
    def has_chat_template(self) -> bool:
        """Return whether `apply_chat_template` works."""
        return self.settings.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; by default with what the model wants around every text, such as
        beginning-of-sequence."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise ValueError("text: is not valid Unicode (it holds half of a surrogate pair)") from error

    def encode_detached(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids, for long texts in a thread: the same as `encode`, faster where there is a faster encoder, and
        without holding the GIL."""
        return self.long_texts.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def long_texts(self) -> LongTextEncoder:
        """Return the encoder of long texts (pdmesh/text/long_text_encoder.py)."""
        added = tuple(token.content for token in self._backend.get_added_tokens_decoder().values())
        return LongTextEncoder(self.to_json, added, self._encode_batch)

    def _encode_batch(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids. The library's `encode` holds the GIL from beginning to end; its batches release it, and without
        offsets there is little to copy and to free under the GIL afterwards."""
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise ValueError("text: is not valid Unicode (it holds half of a surrogate pair)") from error

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of `text`, from its bytes, without encoding it. 0 where nothing can be proved."""
        return 0 if self._token_bytes is None else self._token_bytes.fewest_tokens(text)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Ids outside the vocabulary have no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return one token as it reads in the middle of a text, special tokens by name; bytes that are no text alone are
        U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._read_token(token_id)
        return text

    def single_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of `token_text`, and where they are only part of a character, the token's own; empty for an id without
        text. The bytes of an output's tokens, joined, are the UTF-8 of its text."""
        text = self.token_text(token_id)
        piece = self.piece(token_id)
        own = piece_bytes(self.decoder_stages(), piece) if REPLACEMENT in text and piece is not None else None
        return text.encode() if own is None else own

    def _read_token(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return token or ""
        # What a decoder does to the beginning of a text, such as dropping a space, does not happen in the middle.
        stages = [stage for stage in self.decoder_stages() if not isinstance(stage, StripStart)]
        for stage in stages:
            stage.push("")
        stream = PieceStream(stages)
        return stream.push(token) + stream.flush()

    def apply_chat_template(self, messages: Sequence[Message], how: Rendering = PLAIN) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's next message begins. Raises ValueError without a
        template, or if it rejects the messages."""
        return self.encode(self.render_chat(messages, how), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], how: Rendering = PLAIN) -> str:
        """Return the text that `apply_chat_template` encodes. A template that knows no tools gets them, and turns with calls, as
        plain turns (pdmesh/text/tool_prompt.py)."""
        if self._template is None:
            names = ", ".join(self.settings.template_names)
            which = f"it has the chat templates {names} and none named default" if names else "it has no chat template"
            raise ValueError(f"model: {which}; send a prompt to Generate instead")
        if not self._template.knows_tools:
            messages = with_tools(messages, how.tools)
        return self._template.render(messages, how)

    @property
    def template(self) -> str:
        """Return the source of the model's chat template; "" without one."""
        return "" if self._template is None else self._template.source

    @cached_property
    def tool_format(self) -> str:
        """Return the name of the format in which the model is expected to write calls, by its chat template."""
        if self._template is None:
            return NONE
        if not self._template.knows_tools:
            return PROMPTED
        known = tool_format_of(self._template.source)
        return OTHER if known == NONE else known

    @cached_property
    def reasoning_format(self) -> str:
        """Return the name of the format in which the model is expected to write thoughts, by its chat template; or "none"."""
        return NONE if self._template is None else reasoning_format_of(self._template.source)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Return the ids of the special tokens by their texts."""
        texts = {token_id: self._backend.id_to_token(token_id) for token_id in sorted(self._special_ids)}
        return {text: token_id for token_id, text in texts.items() if text}

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that the vocabulary spells like this, special or not; None without one."""
        return self._backend.token_to_id(text)

    def to_json(self) -> str:
        """Return it all as one tokenizer.json, with the special tokens that other files declare."""
        return self._backend.to_str()

    def piece(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token; None if it has no text: special or unknown."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
            if piece is not None:  # so that ids outside the vocabulary cannot fill it
                self._pieces[token_id] = piece
            return piece

    def decoder_stages(self) -> list[Stage]:
        """Return fresh stages of the decoder, for one stream."""
        return [make() for make in self._stage_factories]

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return token_bytes(self.to_json())

    @cached_property
    def _template(self) -> ChatTemplate | None:
        source = self.settings.chat_template
        return None if source is None else ChatTemplate(source, self.settings.special_tokens)
