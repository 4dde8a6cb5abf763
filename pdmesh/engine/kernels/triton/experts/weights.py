"""The maps of all experts of a layer as one tensor, filled expert by expert as they are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.kernels.triton.linear.dense import TritonDense, VectorDense
from pdmesh.engine.kernels.triton.linear.linear import WordLinear
from pdmesh.engine.kernels.triton.linear.weight_words import TILE_ROWS, WeightWords, packed
from pdmesh.engine.models.layers import DenseLinear, Linear, PackedLinear

PLAIN = "plain"


@dataclass(frozen=True)
class ExpertWeights:
    """Hold one map of all experts, [num_outputs, num_inputs] each. Words are those of weight_words.py, expert after expert; of
    gate and up in one map each half begins with a row tile of its own.

        gate and up     | gate: rows of I, filled up to 64 | up: as many |
    """

    encoding: str  # plain, int8, int4 or fp8
    values: Tensor  # plain: [E, N, K]; words: [E, row tiles, input tiles, 512] int32
    scales: Tensor  # int4: [E, row tiles, groups, 64] int32; int8 and fp8: [E, N] float32; plain: the values
    bias: Tensor | None  # [E, N]
    span: int
    num_outputs: int
    num_inputs: int

    @property
    def bits(self) -> int:
        """Return the bits of a word's value; 0: weights are no words."""
        return {PLAIN: 0, "int4": 4}.get(self.encoding, 8)

    @property
    def num_row_tiles(self) -> int:
        return self.values.shape[1] if self.bits else -(-self.num_outputs // TILE_ROWS)

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles of words along the inputs."""
        return self.values.shape[2] if self.bits else 0

    @property
    def num_bytes(self) -> int:
        scales = self.scales.nbytes if self.bits else 0
        return self.values.nbytes + scales


class ExpertStack:
    """Take the maps of the experts one after the other. `halves`: 2 for gate and up in one."""

    def __init__(self, num_experts: int, halves: int) -> None:
        self._num_experts, self._halves = num_experts, halves
        self._tensors: dict[str, Tensor] = {}
        self._kind: tuple[str, int, int, int] | None = None  # encoding, span, outputs, inputs

    def put(self, number: int, linear: Linear) -> None:
        """Copy one expert's map. Raises TypeError for a map that has no weights here, ValueError for one unlike those before."""
        kind, tensors = _parts(linear, self._halves)
        if self._kind not in (None, kind):
            raise ValueError(f"expert {number}: {kind} is unlike the experts before it, {self._kind}")
        self._kind = kind
        for name, tensor in tensors.items():
            if name not in self._tensors:
                self._tensors[name] = tensor.new_empty((self._num_experts, *tensor.shape))
            self._tensors[name][number] = tensor

    def weights(self) -> ExpertWeights:
        """Return what was taken; all experts must have been."""
        if self._kind is None:
            raise ValueError("experts: none was loaded")
        (encoding, span, outputs, inputs), tensors = self._kind, self._tensors
        values = tensors["values"]
        return ExpertWeights(encoding, values, tensors.get("scales", values), tensors.get("bias"), span, outputs, inputs)


def _parts(linear: Linear, halves: int) -> tuple[tuple[str, int, int, int], dict[str, Tensor]]:
    if not isinstance(linear, (WordLinear, DenseLinear, PackedLinear, TritonDense, VectorDense)):
        raise TypeError(f"{type(linear).__name__} is no map of an expert that the kernels read")
    bias = {} if linear.bias is None else {"bias": linear.bias}
    if isinstance(linear, WordLinear):
        words = _by_halves(linear.weight, halves)
        kind = (words.encoding, words.span, words.num_outputs, words.num_inputs)
        return kind, {"values": words.words, "scales": words.scales, **bias}
    weight = linear.weight.to_dense() if isinstance(linear, PackedLinear) else linear.weight
    return (PLAIN, 0, *weight.shape), {"values": weight, **bias}


def _by_halves(words: WeightWords, halves: int) -> WeightWords:
    """Let each half of the outputs begin with a row tile; what fills it up has scales of zero (int4), or results that are
    not stored."""
    if words.num_outputs // halves % TILE_ROWS == 0:
        return words
    codes, rows = words.codes(), -(-words.num_outputs // halves // TILE_ROWS) * TILE_ROWS

    def moved(by_rows: Tensor) -> Tensor:
        parts = by_rows[: words.num_outputs].view(halves, -1, by_rows.shape[1])
        return F.pad(parts, (0, 0, 0, rows - parts.shape[1])).flatten(0, 1)

    scales = words.scales
    if words.bits == 4:
        by_rows = moved(scales.transpose(1, 2).reshape(-1, scales.shape[1]))
        scales = by_rows.view(-1, TILE_ROWS, scales.shape[1]).transpose(1, 2).contiguous()
    values = packed(moved(codes), words.encoding)
    return replace(words, words=values[: halves * rows // TILE_ROWS], scales=scales)
