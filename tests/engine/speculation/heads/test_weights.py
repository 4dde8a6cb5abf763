"""The file of draft heads: what is read is what was written, and what is wrong with a file is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pdmesh.engine.speculation.draft_heads.weights import BadHeads, Block, DraftHeads, load_heads, save_heads
from tests.engine.speculation.heads.tiny_heads import make_heads


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_heads(make_heads(), tmp_path / "heads.safetensors")
    return tmp_path / "heads.safetensors"


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_what_is_read_is_what_was_written(tmp_path: Path, kind: str) -> None:
    heads = make_heads(kind, depth=3)
    save_heads(heads, tmp_path / "sub" / "heads.safetensors")
    read = load_heads(tmp_path / "sub" / "heads.safetensors")
    assert (read.kind, read.hidden_size, read.depth, read.trained_for) == (kind, heads.hidden_size, 3, heads.trained_for)
    assert torch.equal(read.token_ids, heads.token_ids)
    assert torch.equal(read.norm, heads.norm)
    assert torch.equal(read.head, heads.head.bfloat16())
    assert len(read.blocks) == (1 if kind == "recurrent" else 3)
    for ours, theirs in zip(heads.blocks, read.blocks, strict=True):
        assert all(torch.equal(vars(ours)[name].bfloat16(), vars(theirs)[name]) for name in vars(ours))
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["heads.safetensors"]


def test_heads_know_their_model() -> None:
    heads = make_heads(hidden_size=32, vocab_size=50)
    assert heads.is_for(heads.trained_for)
    assert not heads.is_for("another")
    assert heads.why_not(32, 50) == ""
    assert heads.why_not(48, 50).startswith("hidden_size: 32, but the model has 48")
    assert heads.why_not(32, int(heads.token_ids[-1])).startswith(f"token_ids: {int(heads.token_ids[-1])} is none of")


def drop(name: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, metadata: (tensors.pop(name, None), metadata.pop(name, None))  # type: ignore[return-value]


def put(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, metadata: (metadata if isinstance(value, str) else tensors).__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", "pt"), "format: 'pt' instead of"),
        (drop("format"), "format: '' instead of"),
        (put("version", "2"), "version: '2'; this pdmesh reads '1'"),
        (put("kind", "eagle"), "kind: 'eagle' is not known; it must be one of recurrent, medusa"),
        (put("hidden_size", "-3"), "hidden_size: '-3' is not a count"),
        (put("hidden_size", "64"), "norm: shape (32,) instead of (64,)"),
        (drop("depth"), "depth: '' is not a count"),
        (put("depth", "0"), "depth: 0; it must be 1 to 64"),
        (put("depth", "65"), "depth: 65; it must be 1 to 64"),
        (put("depth", "9" * 5000), "depth: '99999999999999999999' is not a count"),
        (put("kind", "medusa"), "blocks.1.mix: missing"),
        (drop("blocks.0.gate"), "blocks.0.gate: missing"),
        (drop("token_ids"), "token_ids: missing"),
        (put("token_ids", torch.tensor([3, 1, 2])), "token_ids: not an ascending row"),
        (put("token_ids", torch.tensor([-1, 1, 2])), "token_ids: not an ascending row"),
        (put("token_ids", torch.tensor([0.5])), "token_ids: not an ascending row"),
        (put("token_ids", torch.tensor([1, 2, 3])), "head: shape"),
        (put("blocks.0.down", torch.zeros(32, 7)), "blocks.0.down: shape (32, 7) instead of (32, 48)"),
        (put("blocks.0.up", torch.full((48, 64), torch.nan)), "blocks.0.up: not all of it are finite"),
        (put("blocks.0.mix", torch.zeros((32, 64), dtype=torch.int8)), "blocks.0.mix: not all of it are finite"),
    ],
)
def test_what_is_wrong_is_named(path: Path, change: Callable[[dict[str, Any], dict[str, str]], None], message: str) -> None:
    rewrite(path, change)
    with pytest.raises(BadHeads) as raised:
        load_heads(path)
    assert str(raised.value).startswith(f"draft_heads: {path}: {message}")


def test_a_file_that_is_missing_or_cut_off(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadHeads, match="there is no such file; give one, or train"):
        load_heads(tmp_path / "none")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadHeads, match="cut off"):
        load_heads(path)


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    heads = make_heads()
    [block] = heads.blocks
    wrong: list[DraftHeads] = [
        replace(heads, depth=0),
        replace(heads, kind="medusa"),
        replace(heads, head=heads.head[1:]),
        replace(heads, blocks=(Block(block.mix, block.gate, block.up * torch.inf, block.down),)),
    ]
    for each in wrong:
        with pytest.raises(BadHeads):
            save_heads(each, tmp_path / "heads.safetensors")
    assert list(tmp_path.iterdir()) == []
