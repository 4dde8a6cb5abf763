"""A model's tokenizer, from its folder; a thin layer over the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from pdmesh.text.chat_template import ChatTemplate, Message
from pdmesh.text.decoder_stages import Stage, StripStart, parse_decoder
from pdmesh.text.detokenizer import PieceStream
from pdmesh.text.token_bytes import TokenBytes, token_bytes
from pdmesh.text.tokenizer_settings import TokenizerSettings


class Tokenizer:
    """Text to token ids and back, with the model's chat template. Immutable after `load`; safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        self._backend = backend
        self.settings = settings
        self._add_declared_special_tokens(settings.special_tokens.values())
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = backend.decoder
        self._stage_factories = parse_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self._pieces: dict[int, str] = {}  # asked for with every token of every stream
        self._token_texts: dict[int, str] = {}  # asked for again and again: 20 alternatives to each token, mostly the same few

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
        generation_config.json and config.json. FileNotFoundError or ValueError name the file and what is wrong with it."""
        path = Path(folder) / "tokenizer.json"
        if Path(folder).is_file():
            raise ValueError(
                f"{folder} is a file, and a tokenizer is read from a model folder; for a .gguf file, "
                "`pdmesh models fetch FILE` makes one and prints its path"
            )
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: a model folder needs config.json, *.safetensors and tokenizer.json; "
                "`python -m pdmesh.models fetch` makes one of a known model or a .gguf file"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} cannot be read: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, TokenizerSettings.load(folder))

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model accepts: config.json's, which may count unused rows, else the tokenizer's."""
        return self.settings.vocab_size or self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together that the model was made for."""
        return self.settings.max_context

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output."""
        if self.settings.eos_token_ids:
            return frozenset(self.settings.eos_token_ids)
        eos = self._backend.token_to_id(self.settings.special_tokens.get("eos_token", ""))
        return frozenset() if eos is None else frozenset((eos,))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return self.settings.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; by default with what the model wants around every text, such as beginning-of-sequence."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise ValueError("text: is not valid Unicode (it holds half of a surrogate pair)") from error

    def encode_detached(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, for long texts in a thread. The library's `encode` holds the interpreter's lock from beginning to end; its
        batches let go of it, and without offsets there is little to copy and to free under the lock afterwards."""
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise ValueError("text: is not valid Unicode (it holds half of a surrogate pair)") from error

    def fewest_tokens(self, text: str) -> int:
        """`text` has at least so many tokens: told by its bytes, without encoding it. 0 where nothing can be proved."""
        return 0 if self._token_bytes is None else self._token_bytes.fewest_tokens(text)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Ids outside the vocabulary have no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as it reads in the middle of a text, special tokens by name; bytes that are no text alone are U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._read_token(token_id)
        return text

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

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next message begins. ValueError: no template, or a refusal."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text that `apply_chat_template` encodes."""
        if self._template is None:
            raise ValueError("model: it has no chat template; send a prompt to Generate instead")
        return self._template.render(messages)

    def to_json(self) -> str:
        """All of it as one tokenizer.json, with the special tokens that other files declare."""
        return self._backend.to_str()

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None if it has no text: special or unknown."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
            if piece is not None:  # so that ids outside of the vocabulary cannot fill it
                self._pieces[token_id] = piece
            return piece

    def decoder_stages(self) -> list[Stage]:
        """Fresh stages of the decoder, for one stream."""
        return [make() for make in self._stage_factories]

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return token_bytes(self.to_json())

    @cached_property
    def _template(self) -> ChatTemplate | None:
        source = self.settings.chat_template
        return None if source is None else ChatTemplate(source, self.settings.special_tokens)

    def _add_declared_special_tokens(self, names: Iterable[str]) -> None:
        """Some folders name special tokens only in tokenizer_config.json; those of the vocabulary become special here, too."""
        known = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        missing = {name for name in names if name not in known and self._backend.token_to_id(name) is not None}
        if missing:
            self._backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in sorted(missing)])
