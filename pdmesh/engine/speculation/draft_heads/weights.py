"""Draft heads: small maps, trained for one model, that predict the tokens after the next one from its last hidden state.

One safetensors file (`draft_heads.safetensors`, beside the model or elsewhere; tools/draft_heads/__main__.py makes it). H is the
model's hidden size, W the width of a block, V' the reduced vocabulary: the few thousand tokens that the model's outputs are made
of. A head that scored the whole vocabulary would cost as much as the model's own (Zhao et al., FR-Spec, 2025); a token outside
the reduced one is never drafted.

    token_ids       [V']       int32   which token each row of `head` scores; ascending
    norm            [H]                a state begins as hidden / rms(hidden) * norm
    head            [V', H]            scores of a state
    blocks.N.mix    [H, 2H]            block(state, token) = mix x + down(silu(gate x) * up x),
    blocks.N.gate   [W, 2H]                              x = (state, embedding(token) / rms(embedding(token)))
    blocks.N.up     [W, 2H]
    blocks.N.down   [H, W]

Kinds: `recurrent`: one block, which makes the next state of the last one and the token that was guessed from it (EAGLE's feature
regression, Li et al., 2024, without its attention, as in Zhang et al., ReDrafter, 2024): all it knows of a sequence is one
vector. `medusa`: `depth` blocks; block N guesses the token N + 2 places after the state from the state and the last token alone
(Cai et al., Medusa, 2024), so all are computed at once and none sees what the others guess.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pdmesh.engine.config import MAX_DRAFT_TOKENS

FILE = "draft_heads.safetensors"
FORMAT, VERSION = "pdmesh.draft_heads", "1"
KINDS = ("recurrent", "medusa")
MAX_DEPTH = MAX_DRAFT_TOKENS
_ELSE = "train the heads for this model (python -m tools.draft_heads)"


class BadHeads(ValueError):
    """The file of draft heads cannot be used; the message names the file, the field and what to do."""


@dataclass(frozen=True)
class Block:
    """Hold the maps of a block, see the module's docstring."""

    mix: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class DraftHeads:
    """Hold draft heads. `depth`: the most tokens that they draft. `trained_for`: the weights hash of their model, or another name
    of it."""

    kind: str
    hidden_size: int
    depth: int
    trained_for: str
    token_ids: Tensor
    norm: Tensor
    head: Tensor
    blocks: tuple[Block, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that one draft token reads, in 8 bits."""
        tensors: list[Tensor] = [self.head, *vars(self.blocks[0]).values()]
        return sum(tensor.numel() for tensor in tensors)

    def why_not(self, hidden_size: int, vocab_size: int) -> str:
        """Return the reason why a model of these sizes cannot use them; empty where it can."""
        if self.hidden_size != hidden_size:
            return f"hidden_size: {self.hidden_size}, but the model has {hidden_size}; {_ELSE}"
        if int(self.token_ids[-1]) >= vocab_size:
            return f"token_ids: {int(self.token_ids[-1])} is none of the model's {vocab_size} tokens; {_ELSE}"
        return ""

    def is_for(self, weights_hash: str) -> bool:
        """Return whether they are trained on these very weights. Heads of a similar model (a quantized copy, say) are nearly as
        good."""
        return self.trained_for == weights_hash


def load_heads(path: str | Path) -> DraftHeads:
    """Load heads. Raises BadHeads for a file that is missing, truncated, of another format or incomplete."""
    path = Path(path)
    try:
        with _opened(path) as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            _check_format(metadata)
            kind, hidden, depth = metadata.get("kind", ""), _count(metadata, "hidden_size"), _count(metadata, "depth")
            _check_kind(kind)
            token_ids, norm, head = (_tensor(file, names, name) for name in ("token_ids", "norm", "head"))
            blocks = tuple(Block(**tensors) for tensors in _blocks(file, names, 1 if kind == "recurrent" else depth))
            heads = DraftHeads(kind, hidden, depth, metadata.get("trained_for", ""), token_ids, norm, head, blocks)
        check_heads(heads)
    except BadHeads as error:
        raise BadHeads(f"draft_heads: {path}: {error}") from error
    return heads


def save_heads(heads: DraftHeads, path: str | Path) -> None:
    """Write the file, whole or not at all; matrices in bfloat16. Raises BadHeads for heads that `load_heads` would reject."""
    check_heads(heads)
    tensors = {"token_ids": heads.token_ids.to(torch.int32), "norm": heads.norm.float(), "head": heads.head.bfloat16()}
    for number, block in enumerate(heads.blocks):
        tensors |= {f"blocks.{number}.{name}": tensor.bfloat16() for name, tensor in vars(block).items()}
    metadata = {"format": FORMAT, "version": VERSION, "kind": heads.kind, "trained_for": heads.trained_for}
    metadata |= {"hidden_size": str(heads.hidden_size), "depth": str(heads.depth)}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)
        Path(partial).chmod(0o644)  # readable for other users, such as that of a worker
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def check_heads(heads: DraftHeads) -> None:
    """Raise BadHeads, naming the field, unless shapes, ids and numbers are as they must be."""
    _check_kind(heads.kind)
    hidden, ids = heads.hidden_size, heads.token_ids
    if not 1 <= heads.depth <= MAX_DEPTH:
        raise BadHeads(f"depth: {heads.depth}; it must be 1 to {MAX_DEPTH}")
    expected = 1 if heads.kind == "recurrent" else heads.depth
    if len(heads.blocks) != expected:
        raise BadHeads(f"blocks: {len(heads.blocks)} of them; {heads.kind} heads of depth {heads.depth} have {expected}")
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or int(ids[0]) < 0 or not bool((ids.diff() > 0).all()):
        raise BadHeads("token_ids: not an ascending row of token ids; train the heads anew")
    _check("norm", heads.norm, hidden)
    _check("head", heads.head, len(ids), hidden)
    for number, block in enumerate(heads.blocks):
        width = block.gate.shape[0] if block.gate.dim() else 0
        shapes = {"mix": (hidden, 2 * hidden), "gate": (width, 2 * hidden), "up": (width, 2 * hidden), "down": (hidden, width)}
        for name, shape in shapes.items():
            _check(f"blocks.{number}.{name}", getattr(block, name), *shape)


def _check(name: str, tensor: Tensor, *shape: int) -> None:
    if tensor.shape != shape or 0 in shape:
        raise BadHeads(f"{name}: shape {tuple(tensor.shape)} instead of {shape}; the file is damaged, train the heads anew")
    if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
        raise BadHeads(f"{name}: not all of it are finite numbers; train the heads anew")


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise BadHeads(f"kind: {kind!r} is not known; it must be one of {', '.join(KINDS)}")


def _check_format(metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise BadHeads(f"format: {metadata.get('format', '')!r} instead of {FORMAT!r}; give a file of draft heads")
    if metadata.get("version") != VERSION:
        raise BadHeads(f"version: {metadata.get('version', '')!r}; this pdmesh reads {VERSION!r}, train the heads anew with it")


def _count(metadata: Mapping[str, str], name: str) -> int:
    value = metadata.get(name, "")
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise BadHeads(f"{name}: {value[:20]!r} is not a count; the file is damaged, train the heads anew")
    return int(value)


def _blocks(file: Any, names: set[str], count: int) -> Iterator[dict[str, Tensor]]:
    for number in range(count):
        yield {name: _tensor(file, names, f"blocks.{number}.{name}") for name in ("mix", "gate", "up", "down")}


def _tensor(file: Any, names: set[str], name: str) -> Tensor:
    if name not in names:
        raise BadHeads(f"{name}: missing; the file is not whole, train the heads anew")
    tensor: Tensor = file.get_tensor(name)
    return tensor.long() if name == "token_ids" and not tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise BadHeads(f"there is no such file; give one, or {_ELSE}")
    try:
        opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadHeads(f"it cannot be read ({error}); it is cut off or no safetensors file, train the heads anew") from error
    with opened as file:
        yield file
