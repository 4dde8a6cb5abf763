"""Tokenizers of GGUF metadata, small ones built here and the real one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from pdmesh.text.gguf_tokenizer import build_tokenizer, merges_of_scores, write_gguf_tokenizer
from pdmesh.text.tokenizer import Tokenizer
from tests.text.samples import byte_fallback_backend

SPACE = "▁"


def byte_level_metadata(pre: str = "smollm", changes: Mapping[str, object] | None = None) -> dict[str, object]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", *alphabet, "th", "the", "Ġthe", "12"]
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    return {**metadata, **(changes or {})}


def sentencepiece_metadata(changes: Mapping[str, object] | None = None) -> dict[str, object]:
    """The vocabulary of the byte-fallback sample, its merges told as scores: longer pieces were merged later."""
    vocab = byte_fallback_backend().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(token_id) for token_id in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {**metadata, **(changes or {})}


def load(metadata: dict[str, object], folder: Path) -> Tokenizer:
    write_gguf_tokenizer(metadata, folder)
    return Tokenizer.load(folder)


def test_byte_level(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokenizer = load(metadata, tmp_path)
    ids = tokenizer.encode("<|im_start|>the the<think>1200")
    assert [tokens[token_id] for token_id in ids] == ["<|im_start|>", "the", "Ġthe", "<think>", "1", "2", "0", "0"]
    assert tokenizer.decode(ids) == "the the<think>1200"
    assert (tokenizer.eos_token_ids, tokenizer.max_context, tokenizer.has_chat_template) == (frozenset((2,)), 512, True)


def test_other_pre_tokenizers_keep_digits_together_or_begin_with_bos(tmp_path: Path) -> None:
    twelve = load(byte_level_metadata("gpt-2"), tmp_path).encode("12")
    assert len(twelve) == 1
    assert load(byte_level_metadata("llama-bpe"), tmp_path).encode("12") == [1, *twelve]
    assert (
        load(byte_level_metadata("llama-bpe", changes={"tokenizer.ggml.add_bos_token": False}), tmp_path).encode("12") == twelve
    )
    assert len(load(byte_level_metadata("qwen2"), tmp_path).encode("12")) == 2


def test_several_ends(tmp_path: Path) -> None:
    assert load(byte_level_metadata(changes={"tokenizer.ggml.eot_token_id": 0}), tmp_path).eos_token_ids == {0, 2}


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece_metadata(), tmp_path)
    original = byte_fallback_backend()
    for text in ("the dog", "  the  dog ", "thé 👍 世", "dogthe<s>"):
        assert tokenizer.encode(text) == [1, *original.encode(text).ids]
        assert tokenizer.decode(tokenizer.encode(text)) == original.decode(original.encode(text).ids)
    bare = load(
        sentencepiece_metadata(changes={"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}),
        tmp_path,
    )
    assert bare.decode(bare.encode(" the")) == " the"
    assert bare.encode("the") == [original.token_to_id("the")]


def test_merges_come_best_score_first_and_never_use_bytes_or_special_tokens() -> None:
    assert merges_of_scores(sentencepiece_metadata())[:4] == [["t", "h"], ["th", "e"], [SPACE, "the"], ["d", "o"]]


def test_what_is_not_covered_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'tekken'"):
        build_tokenizer(byte_level_metadata("tekken"))
    with pytest.raises(ValueError, match="'t5'"):
        build_tokenizer(byte_level_metadata(changes={"tokenizer.ggml.model": "t5"}))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges"):
        build_tokenizer(byte_level_metadata(changes={"tokenizer.ggml.merges": None}))


def test_merges_of_unknown_pieces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contradicts itself"):
        write_gguf_tokenizer(byte_level_metadata(changes={"tokenizer.ggml.merges": ["q q"]}), tmp_path)
