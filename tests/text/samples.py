"""Tokenizers of the two kinds that Llama-family models have, built here in milliseconds, and folders that hold them."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pdmesh.text.tokenizer import Tokenizer, TokenizerSettings

_TEXTS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps",
    "ein schöner Tag für größere Wörter; café, naïve, Ångström",
    "👍🏽 emoji 👩‍👩‍👧 and more 👍 emoji 世界 世界 你好",
    "def f(x):\n    return x ** 2  # 1234567890\n",
]
_SPACE = "▁"


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE, as of SmolLM or Llama 3; merges cut characters in the middle. Ids 0 to 2 are special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_TEXTS * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think now>", normalized=False)])  # text, though no byte-level spelling
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback, as of Llama 2 or TinyLlama. Ids 0 to 2 are special, 3 to 258 are bytes."""
    vocab = {token: token_id for token_id, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = [
        _SPACE,
        "t",
        "h",
        "e",
        "d",
        "o",
        "g",
        "é",
        "世",
        "th",
        "the",
        f"{_SPACE}the",
        "do",
        "dog",
        f"{_SPACE}dog",
        f"{_SPACE * 2}",
    ]
    vocab |= {word: 259 + rank for rank, word in enumerate(words)}
    merges = [("t", "h"), ("th", "e"), (_SPACE, "the"), ("d", "o"), ("do", "g"), (_SPACE, "dog"), (_SPACE, _SPACE)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """The vocabulary of `byte_fallback_backend` behind the decoder of older SentencePiece conversions."""
    backend = byte_fallback_backend()
    backend.decoder = decoders.Metaspace()
    return backend


def plain_backend() -> tokenizers.Tokenizer:
    """Whole words and no decoder at all: tokens are joined by spaces."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: rank for rank, word in enumerate("abcde")}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


BACKENDS = {
    "byte_level": byte_level_backend,
    "byte_fallback": byte_fallback_backend,
    "metaspace": metaspace_backend,
    "plain": plain_backend,
}


def make_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer without a folder."""
    return Tokenizer(BACKENDS[kind](), TokenizerSettings())


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    """A model folder with tokenizer.json and, per keyword, NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
