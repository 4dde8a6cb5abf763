"""Draft heads on the CPU kernels, in 8 bits: two native calls (draft_head.cpp) for each draft token."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from pdmesh.engine.kernels.cpu.library import FORMATS, Linear
from pdmesh.engine.kernels.cpu.model import PackedLinear, gathered
from pdmesh.engine.loader import pack
from pdmesh.engine.loader.quantize import quantize_int8
from pdmesh.engine.speculation.draft_heads.reference import Chain, Root, Scores
from pdmesh.engine.speculation.draft_heads.weights import Block, DraftHeads

_LANES = 16


class _Block(ctypes.Structure):
    """PdmeshDraftBlock of draft_head.cpp."""

    _fields_ = (
        ("hidden", ctypes.c_int32),
        ("embedding_format", ctypes.c_int32),
        ("embedding", ctypes.c_void_p),
        ("mix", Linear),
        ("gate_up", Linear),
        ("down", Linear),
    )


class _Chains(ctypes.Structure):
    """PdmeshDraftChains of draft_head.cpp."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        *(
            (name, ctypes.c_void_p)
            for name in ("norm", "hidden", "token_ids", "last", "most", "least", "tokens", "chances", "counts")
        ),
    )


class NativeHeads:
    """Implement HeadMaths (reference.py). It computes with `team`, the address of a pdmesh::Team of `owner`, between that one's
    steps."""

    def __init__(self, heads: DraftHeads, embedding: Tensor, library: ctypes.CDLL, team: int, owner: object = None) -> None:
        """Create it. `embedding` [vocab, H] float32 or bfloat16, contiguous: the model's, which is not copied.

        Raises ValueError where heads and embedding are not of one model or not for these kernels, RuntimeError for a library of
        another version.
        """
        if why := heads.why_not(embedding.shape[1], embedding.shape[0]) or why_not_native(heads, embedding):
            raise ValueError(why)
        _declare(library)
        if library.pdmesh_draft_bytes() != ctypes.sizeof(_Block) + ctypes.sizeof(_Chains):
            raise RuntimeError(f"{library._name} is not of this version (PdmeshDraftBlock differs); build the kernels anew")
        self.heads, self._embedding, self._library, self._team, self._owner = heads, embedding, library, team, owner
        self._norm = heads.norm.float().contiguous()
        self._norm_address = self._norm.data_ptr()
        self._token_ids = heads.token_ids.long().contiguous()
        self._ids_address = self._token_ids.data_ptr()
        linears = [linear for block in heads.blocks for linear in _linears(block)]
        *self._linears, self._head = gathered([_packed(matrix) for matrix in (*linears, heads.head)])
        self._head_descriptor = self._head.descriptor()
        self._head_address = ctypes.byref(self._head_descriptor)
        self._blocks = [self._descriptor(*self._linears[at : at + 3]) for at in range(0, len(linears), 3)]
        self._block_addresses = [ctypes.byref(block) for block in self._blocks]
        self._logits = torch.empty((1, self._head.num_outputs))

    def _descriptor(self, mix: PackedLinear, gate_up: PackedLinear, down: PackedLinear) -> _Block:
        form = FORMATS[_format(self._embedding)]
        maps = (linear.descriptor() for linear in (mix, gate_up, down))
        return _Block(self.heads.hidden_size, form, self._embedding.data_ptr(), *maps)

    def begin(self, hidden: Sequence[Tensor]) -> Tensor:
        count = len(hidden)
        out = torch.empty((count, self.heads.hidden_size))
        pointers = (ctypes.c_void_p * count)(*[row.data_ptr() for row in hidden])
        self._library.pdmesh_draft_begin(self.heads.hidden_size, count, pointers, self._norm_address, out.data_ptr())
        return out

    def chains(self, roots: Sequence[Root]) -> list[Chain]:
        """Compute all chains in one native call."""
        count, depth = len(roots), self.heads.depth
        hidden = (ctypes.c_void_p * count)(*[root.hidden.data_ptr() for root in roots])
        last = (ctypes.c_int64 * count)(*[root.last for root in roots])
        most = (ctypes.c_int32 * count)(*[root.most for root in roots])
        least = (ctypes.c_float * count)(*[root.least_chance for root in roots])
        tokens, chances = (ctypes.c_int64 * (count * depth))(), (ctypes.c_float * (count * depth))()
        counts = (ctypes.c_int32 * count)()
        arrays = (ctypes.addressof(each) for each in (last, most, least, tokens, chances, counts))
        asked = _Chains(count, depth, self._norm_address, ctypes.addressof(hidden), self._ids_address, *arrays)
        block = self._block_addresses[0]
        if self._library.pdmesh_draft_chains(self._team, block, self._head_address, ctypes.byref(asked)):
            raise MemoryError(f"no memory to draft for {count} sequences")
        ends = ((row * depth, row * depth + counts[row]) for row in range(count))
        return [(tokens[first:end], chances[first:end]) for first, end in ends]

    def advance(self, number: int, states: Tensor, token_ids: Sequence[int]) -> Tensor:
        count, out = len(token_ids), torch.empty_like(states)
        tokens = (ctypes.c_int64 * count)(*token_ids)
        if self._library.pdmesh_draft_block(
            self._team, self._block_addresses[number], count, states.data_ptr(), tokens, out.data_ptr()
        ):
            raise MemoryError(f"no memory to draft for {count} sequences")
        return out

    def score(self, states: Tensor) -> Scores:
        count = len(states)
        logits, best, chances = self._room(count), (ctypes.c_int64 * count)(), (ctypes.c_float * count)()
        if self._library.pdmesh_draft_scores(
            self._team, self._head_address, count, states.data_ptr(), logits.data_ptr(), best, chances
        ):
            raise MemoryError(f"no memory to draft for {count} sequences")
        return Scores(logits, best[:], chances[:])

    def _room(self, count: int) -> Tensor:
        """Return [count, V'] float32, the same memory each time: new pages would cost more than the scores."""
        if len(self._logits) < count:
            self._logits = torch.empty((count, self._head.num_outputs))
        return self._logits[:count]


def why_not_native(heads: DraftHeads, embedding: Tensor) -> str:
    """Return why the kernels cannot compute these heads; empty where they can."""
    if heads.hidden_size % _LANES:
        return f"hidden_size: {heads.hidden_size} is not a multiple of {_LANES}"
    if embedding.device.type != "cpu" or not embedding.is_contiguous() or _format(embedding) not in ("float32", "bfloat16"):
        return f"embedding: {embedding.dtype} on {embedding.device}; it must be float32 or bfloat16 on the cpu"
    return ""


def _format(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _linears(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    return block.mix, pack.interleave_gate_up(block.gate.float(), block.up.float()), block.down


def _packed(matrix: Tensor) -> PackedLinear:
    weight = quantize_int8(matrix)
    rows, width = matrix.shape
    return PackedLinear("int8", rows, width, 0, pack.pack_int8(weight), pack.pad_to_panels(weight.scales))


def _declare(library: ctypes.CDLL) -> None:
    """Declare argument types: without them ctypes would cut pointers to 32 bits."""
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    library.pdmesh_draft_begin.argtypes, library.pdmesh_draft_begin.restype = [int32, int32, *[pointer] * 3], None
    library.pdmesh_draft_bytes.restype = ctypes.c_int64
    library.pdmesh_draft_chains.argtypes, library.pdmesh_draft_chains.restype = [pointer] * 4, int32
    library.pdmesh_draft_block.argtypes, library.pdmesh_draft_block.restype = [pointer, pointer, int32, *[pointer] * 3], int32
    library.pdmesh_draft_scores.argtypes, library.pdmesh_draft_scores.restype = [pointer, pointer, int32, *[pointer] * 4], int32
