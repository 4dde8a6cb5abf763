"""Makes the tokenizer of a model folder, whichever files hold it, and adds the tokens that other files declare.

    tokenizer.json                      as it is
    tokenizer.model                     SentencePiece, BPE: converted as that of a GGUF file is
    vocab.json and merges.txt           byte-level BPE of GPT-2 or Qwen 2: the same

Tokens are added as transformers does (tokenization_utils_tokenizers.py, 5.x): those of `added_tokens_decoder`, or of
added_tokens.json and special_tokens_map.json, then the named special tokens and `extra_special_tokens`, of which each is special
from then on. A token that would get an id beyond the model's vocabulary is not added: it has no embedding, so it stays text.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from pdmesh.text.gguf_tokenizer import build_tokenizer

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKENIZER, SENTENCEPIECE, VOCABULARY, MERGES = "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"
CONVERT = (
    "make a tokenizer.json where transformers is installed: "
    "python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('FOLDER').save_pretrained('FOLDER')\""
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder holds files that `read_backend` makes a tokenizer of."""
    files = ((TOKENIZER,), (SENTENCEPIECE,), (VOCABULARY, MERGES))
    return any(all((folder / name).is_file() for name in names) for names in files)


def read_backend(folder: Path, config: Mapping[str, object], model_type: str) -> tokenizers.Tokenizer:
    """Return the tokenizer. `config`: tokenizer_config.json. Raises FileNotFoundError, or ValueError naming the file."""
    if (folder / TOKENIZER).is_file():
        return _from(folder / TOKENIZER, (folder / TOKENIZER).read_bytes())
    if (folder / SENTENCEPIECE).is_file():
        made = build_tokenizer(_sentencepiece(folder / SENTENCEPIECE, config))
        return _from(folder / SENTENCEPIECE, json.dumps({**made, **_marked(made, config)}).encode())
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        return _from(folder / VOCABULARY, _made(_byte_level(folder, config, model_type)))
    raise FileNotFoundError(
        f"{folder / TOKENIZER} is missing: a model folder needs config.json, *.safetensors and {TOKENIZER} (or {SENTENCEPIECE}, "
        f"or {VOCABULARY} with {MERGES}); `python -m pdmesh.models fetch` makes one of a known model or a .gguf file"
    )


def _made(metadata: Mapping[str, object]) -> bytes:
    return json.dumps(build_tokenizer(metadata)).encode()


def _from(path: Path, content: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read: {error}; get it again") from error


# Tokens that other files declare


def named_tokens(config: Mapping[str, object], special_map: Mapping[str, object]) -> dict[str, AddedToken]:
    """Return special tokens by name: the usual ones, and those of a model's own, such as `image_token`, which templates may
    use."""
    sources = (config,) if "added_tokens_decoder" in config else (config, special_map)
    found: dict[str, AddedToken] = {}
    for source in sources:
        extra = source.get("extra_special_tokens")
        own = extra if isinstance(extra, Mapping) else {}
        for name, declared in [*source.items(), *own.items()]:
            token = _declared(declared) if name.endswith("_token") or name in own else None
            if token is not None and not name.startswith("add_"):
                found[name] = token
    return found


def _extra_tokens(config: Mapping[str, object], special_map: Mapping[str, object]) -> list[AddedToken]:
    sources = (config,) if "added_tokens_decoder" in config else (config, special_map)
    for source in reversed(sources):
        for key in ("extra_special_tokens", "additional_special_tokens"):
            listed = source.get(key)
            if isinstance(listed, list) and listed:
                return [token for token in map(_declared, listed) if token is not None]
    return []


def _declared(value: object) -> AddedToken | None:
    """Return a token that is declared as a text or as a table; None for another value."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str) and value["content"]:
        return _token(value, special=True)
    return None


def _token(table: Mapping[str, object], *, special: bool | None = None) -> AddedToken:
    flags = {name: bool(table[name]) for name in _FLAGS if name in table}
    return AddedToken(str(table["content"]), **(flags if special is None else {**flags, "special": special}))


def add_declared(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, object],
    special_map: Mapping[str, object],
    added: Mapping[str, object],
    max_id: int,
) -> None:
    """Add what tokenizer_config.json, special_tokens_map.json and added_tokens.json (`added`) declare. `max_id`: the vocabulary
    of the model; 0: unknown. Raises ValueError naming the key."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    for token in _by_id(config, special_map, added):
        if repr(token) not in known:
            _add(backend, token, max_id, special=token.special)
    for token in (*named_tokens(config, special_map).values(), *_extra_tokens(config, special_map)):
        _add(backend, token, max_id, special=True)


def _add(backend: tokenizers.Tokenizer, token: AddedToken, max_id: int, *, special: bool) -> None:
    if backend.token_to_id(token.content) is None and max_id and backend.get_vocab_size(with_added_tokens=True) >= max_id:
        return
    (backend.add_special_tokens if special else backend.add_tokens)([token])


def _by_id(config: Mapping[str, object], special_map: Mapping[str, object], added: Mapping[str, object]) -> list[AddedToken]:
    """Return added tokens in the order of their ids, in which they get them."""
    declared = config.get("added_tokens_decoder")
    if declared is not None:
        if not isinstance(declared, Mapping) or not all(_is_entry(*item) for item in declared.items()):
            raise ValueError("tokenizer_config.json: added_tokens_decoder is no mapping of ids to tokens; get the file again")
        return [_token(declared[key]) for key in sorted(declared, key=int)]
    if not all(isinstance(index, int) for index in added.values()):
        raise ValueError("added_tokens.json: is no mapping of tokens to ids; get the file again")
    specials = {token.content for token in (*named_tokens(config, special_map).values(), *_extra_tokens(config, special_map))}
    in_order = sorted(added, key=lambda text: int(str(added[text])))
    return [AddedToken(text, normalized=text not in specials, special=text in specials) for text in in_order]


def _is_entry(key: object, value: object) -> bool:
    return str(key).isdigit() and isinstance(value, Mapping) and isinstance(value.get("content"), str)


# SentencePiece: its protobuf (sentencepiece_model.proto), read field by field, as the keys of a GGUF file


def _sentencepiece(path: Path, config: Mapping[str, object]) -> Mapping[str, object]:
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(_bytes(value))) for number, value in fields if number == 1]
        trainer, normalizer = ({k: v for n, v in fields if n == part for k, v in _fields(_bytes(v))} for part in (2, 3))
        tokens = [_bytes(piece[1]).decode() for piece in pieces]
        scores = [struct.unpack("<f", _bytes(piece[2]))[0] if 2 in piece else 0.0 for piece in pieces]
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise ValueError(f"{path} is no SentencePiece model; get it again") from error
    if not tokens or trainer.get(3, 1) != 2:
        raise ValueError(f"{path}: its SentencePiece model is no BPE, which is all that is converted here; {CONVERT}")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise ValueError(f"{path}: it normalizes texts, which is not converted here; {CONVERT}")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [piece.get(3, 1) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)) and config.get("add_prefix_space") is not False,
        **_roles(config, {"unknown": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2)}),
    }


def _marked(made: Mapping[str, object], config: Mapping[str, object]) -> dict[str, object]:
    """Return how spaces become marks: as transformers' LlamaTokenizer has it, no mark is put before a text that begins with a
    space, and none behind a special token (`legacy`: also there)."""
    scheme = "always" if config.get("legacy") else "first"
    prefixed = isinstance(made["normalizer"], Mapping) and len(made["normalizer"]["normalizers"]) > 1
    marks = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme if prefixed else "never", "split": False}
    return {"normalizer": None, "pre_tokenizer": marks}


def _roles(config: Mapping[str, object], ids: Mapping[str, object]) -> dict[str, object]:
    keys: dict[str, object] = {f"tokenizer.ggml.{role}_token_id": number for role, number in ids.items()}
    flags = {f"tokenizer.ggml.{key}": bool(config.get(key)) for key in ("add_bos_token", "add_eos_token")}
    return {**keys, **flags}


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message: numbers (varint), and bytes of everything else (wire format, protobuf.dev)."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, number = key & 7, key >> 3
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + size > len(message):
            raise ValueError("the message is cut off")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of too many bytes")


# vocab.json and merges.txt

_PRE_TOKENIZERS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_CLASS_OF_MODEL = {"gpt2": "GPT2Tokenizer", **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer")}


def _byte_level(folder: Path, config: Mapping[str, object], model_type: str) -> Mapping[str, object]:
    kind = str(config.get("tokenizer_class") or _CLASS_OF_MODEL.get(model_type, "unknown")).removesuffix("Fast")
    if kind not in _PRE_TOKENIZERS or config.get("add_prefix_space"):
        raise ValueError(
            f"{folder / VOCABULARY}: how tokenizer_class {kind!r} cuts a text is not known here ({', '.join(_PRE_TOKENIZERS)} "
            f"are, without add_prefix_space); {CONVERT}"
        )
    tokens = _ordered(folder / VOCABULARY)
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    named = {role: named_tokens(config, {}).get(f"{role}_token") for role in ("bos", "eos")}
    ids = {role: tokens.index(token.content) for role, token in named.items() if token and token.content in tokens}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _PRE_TOKENIZERS[kind],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        **_roles(config, ids),
    }


def _ordered(path: Path) -> Sequence[str]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
        tokens = sorted(ids, key=ids.__getitem__)
        if [ids[token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("its ids have gaps")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no vocabulary of ids from 0 on ({error}); get it again") from error
    return tokens
