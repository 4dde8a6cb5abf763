"""Writes the tokenizer inside a GGUF file as the files of a Hugging Face folder.

A GGUF holds vocabulary, merges, token types, the *name* of its pre-tokenizer and the chat template. Two kinds are covered:
byte-level BPE ("gpt2") with the pre-tokenizers of SmolLM, Llama 3, Qwen 2 and GPT-2, and SentencePiece BPE ("llama", as in Llama
2 and TinyLlama). Others are rejected by name: a wrong pre-tokenizer would be nearly right, which is worse than none.

Sources: the GGUF specification (keys `tokenizer.ggml.*`), the pre-tokenizer table of llama.cpp's `llama-vocab.cpp`, and the
tokenizer.json files that those models were published with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

JsonValue = Mapping[str, object]
Metadata = Mapping[str, object]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTE_LEVEL: JsonValue = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS: JsonValue = {"type": "Digits", "individual_digits": True}


def _sequence(*steps: JsonValue) -> JsonValue:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> JsonValue:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _sequence(split, {**_BYTE_LEVEL, "use_regex": False})


_PRE_TOKENIZERS: dict[str, JsonValue] = {
    "gpt-2": _BYTE_LEVEL,
    **dict.fromkeys(("smollm", "starcoder", "refact"), _sequence(_DIGITS, _BYTE_LEVEL)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _split(_LLAMA3_SPLIT)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _split(_QWEN2_SPLIT)),
}
# Llama 3 takes a word that is in the vocabulary whole, whatever its merges would make of it, and begins every text with BOS.
_LLAMA3 = frozenset(("llama-bpe", "llama3", "llama-v3"))
_NORMALIZED = frozenset(("qwen2", "deepseek-r1-qwen"))


def write_gguf_tokenizer(metadata: Metadata, folder: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        metadata: the GGUF's key-value pairs as Python values (`field.contents()` of a gguf.GGUFReader).
        folder: exists.

    Raises ValueError naming what is missing or not covered."""
    folder = Path(folder)
    tokenizer_json = json.dumps(build_tokenizer(metadata))
    try:
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"GGUF: its tokenizer contradicts itself: {error}") from error
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    for name, content in (
        ("tokenizer_config.json", _tokenizer_config(metadata)),
        ("generation_config.json", _generation_config(metadata)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_tokenizer(metadata: Metadata) -> JsonValue:
    """Return the content of tokenizer.json."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_parts, "llama": _sentencepiece_parts}
    if kind not in builders:
        raise ValueError(
            f"GGUF: tokenizer {kind!r} is not covered ({', '.join(builders)} are); use the model's Hugging Face folder"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata),
        "post_processor": _post_processor(metadata),
        **builders[str(kind)](metadata),
    }


def _byte_level_parts(metadata: Metadata) -> JsonValue:
    pre = str(metadata.get("tokenizer.ggml.pre"))
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"GGUF: pre-tokenizer {pre!r} is not covered ({', '.join(_PRE_TOKENIZERS)} are); use the model's folder")
    merges = [merge.split(" ", 1) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    return {
        "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": _bpe_model(metadata, merges, ignore_merges=pre in _LLAMA3),
    }


def _sentencepiece_parts(metadata: Metadata) -> JsonValue:
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    from_marks = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": ([{"type": "Prepend", "prepend": _SPACE}] if prefix else []) + [to_marks],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [from_marks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe_model(metadata, merges_of_scores(metadata), unk_token=_named(metadata, "unknown"), byte_fallback=True),
    }


def merges_of_scores(metadata: Metadata) -> list[list[str]]:
    """Return the merge rules of a SentencePiece BPE, best first.

    SentencePiece stores no rules: it merges the neighbours whose union has the best score. Each way to cut a piece in two pieces
    is a rule with the rank of the whole; among cuts of one piece the lower ids go first."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    scores = metadata["tokenizer.ggml.scores"]
    assert isinstance(scores, list)
    ids = {
        token: token_id for token_id, (token, kind) in enumerate(zip(tokens, _types(metadata), strict=True)) if kind == _NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in ids.items():
        cuts = ((token[:end], token[end:]) for end in range(1, len(token)))
        ranked += [
            (-scores[token_id], ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids
        ]
    return [[left, right] for *_, left, right in sorted(ranked)]


def _bpe_model(
    metadata: Metadata,
    merges: Sequence[Sequence[str]],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> JsonValue:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk_token is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {token: token_id for token_id, token in enumerate(_strings(metadata, "tokenizer.ggml.tokens"))},
        "merges": list(merges),
    }


def _added_tokens(metadata: Metadata) -> list[JsonValue]:
    """Return the added tokens. Control tokens are special; user-defined ones are found whole in a text, but are text."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = zip(_strings(metadata, "tokenizer.ggml.tokens"), _types(metadata), strict=True)
    return [
        {"id": token_id, "content": token, **plain, "special": kind != _USER_DEFINED}
        for token_id, (token, kind) in enumerate(tokens)
        if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and metadata["tokenizer.ggml.model"] == "llama")
    ]


def _post_processor(metadata: Metadata) -> JsonValue | None:
    """Return a post-processor that adds BOS before and EOS after texts encoded "with special tokens", if the model wants them."""
    adds_bos = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    before = _affix(metadata, "bos", adds_bos)
    behind = _affix(metadata, "eos", False)
    if not before and not behind:
        return None
    text: JsonValue = {"Sequence": {"id": "A", "type_id": 0}}
    other: JsonValue = {"Sequence": {"id": "B", "type_id": 1}}
    used = {token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in (*before, *behind)}
    marks_before = [{"SpecialToken": {"id": token, "type_id": 0}} for token, _ in before]
    marks_behind = [{"SpecialToken": {"id": token, "type_id": 0}} for token, _ in behind]
    single = [*marks_before, text, *marks_behind]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, other], "special_tokens": used}


def _affix(metadata: Metadata, role: str, default: bool) -> list[tuple[str, int]]:
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if not metadata.get(f"tokenizer.ggml.add_{role}_token", default) or not isinstance(token_id, int):
        return []
    return [(_strings(metadata, "tokenizer.ggml.tokens")[token_id], token_id)]


def _tokenizer_config(metadata: Metadata) -> JsonValue:
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: _named(metadata, role) for name, role in roles.items()}
    config: dict[str, object] = {
        # The generic class: transformers' classes for families would replace our pre-tokenizer by their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in named.items() if token is not None},
    }
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(context, int):
        config["model_max_length"] = context
    if metadata.get("tokenizer.chat_template"):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _generation_config(metadata: Metadata) -> JsonValue:
    """Return the generation config: an output ends with EOS; chat models of some families end a turn with another token, named
    separately."""
    ends = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token_id for token_id in ends if isinstance(token_id, int)))
    named = {"bos_token_id": "bos", "pad_token_id": "padding"}
    others = {name: metadata.get(f"tokenizer.ggml.{role}_token_id") for name, role in named.items()}
    config = {name: token_id for name, token_id in others.items() if isinstance(token_id, int)}
    return {**config, **({"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {})}


def _named(metadata: Metadata, role: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return _strings(metadata, "tokenizer.ggml.tokens")[token_id] if isinstance(token_id, int) else None


def _strings(metadata: Metadata, key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise ValueError(f"GGUF: {key} is missing; the file holds no complete tokenizer")
    return value


def _types(metadata: Metadata) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    num_tokens = len(_strings(metadata, "tokenizer.ggml.tokens"))
    return value if isinstance(value, list) else [_NORMAL] * num_tokens
