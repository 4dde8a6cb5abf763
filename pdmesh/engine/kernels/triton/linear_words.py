"""A linear map over weights in words: the kernel is chosen by the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.kernels.triton.weight_product import HALVES, INVARIANT_BLOCK, TILE_ROWS_MAX, VECTOR_ROWS, WordProduct, expanded
from pdmesh.engine.kernels.triton.weight_words import WeightWords


class WordLinear:
    """[M, K] -> [M, N] of the same dtype (pdmesh.engine.models.layers.Linear).

    | rows | kernel | numbers |
    | --- | --- | --- |
    | up to 8 (int4: 4) | vector | float32 weights, products and sums |
    | up to 128 | tile | int4 rounded to x's dtype, int8 and fp8 exact; float32 sums on the tensor cores |
    | more | expand, `F.linear` | weights rounded to x's dtype; the library's sums (activations in fp8: linear_fp8.py) |

    A row's bits depend on nothing beside it within a kernel, but the three differ from each other, and the first two between
    powers of two that M rounds up to. `invariant` takes the tile kernel with tiles of 16 rows for every M: slower for a prompt
    (each 16 rows read the weights again, from the L2 cache), the same bits for a row wherever it stands.

    Error of the sum of K products, u = 2^-24 and d = x's unit roundoff (2^-8 bfloat16, 2^-11 float16), S = sum |x| |w|:
    at most (K u + d) S by the vector kernel, int8 and fp8 tiles; (K u + 2 d) S otherwise; plus d |result| by the last rounding.
    float32 inputs: vector up to 8 rows, else expand and `F.linear`; not with `invariant`, which refuses them.
    """

    def __init__(self, weight: WeightWords, bias: Tensor | None, invariant: bool) -> None:
        self.weight, self.bias, self.invariant = weight, bias, invariant
        self.product = WordProduct(weight, bias)
        kernels = f"tile{INVARIANT_BLOCK}" if invariant else f"vector{self._vector_rows}-tile{TILE_ROWS_MAX}-{self._many}"
        self.kind = f"triton-{weight.encoding}-{kernels}"

    @property
    def _vector_rows(self) -> int:
        return VECTOR_ROWS[self.weight.encoding]

    @property
    def _many(self) -> str:
        """Names what `_product_of_many` does."""
        return "mm"

    def __call__(self, x: Tensor) -> Tensor:
        if self.invariant:
            return self._invariant(x)
        if x.shape[0] <= self._vector_rows:
            return self.product.vector(x)
        if x.shape[0] <= TILE_ROWS_MAX and x.dtype in HALVES:
            return self.product.tile(x)
        return self._product_of_many(x)

    def _invariant(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self.weight.num_outputs))
        for first in range(0, x.shape[0], TILE_ROWS_MAX):
            part = slice(first, first + TILE_ROWS_MAX)
            self.product.tile(x[part], out[part], INVARIANT_BLOCK)
        return out

    def _product_of_many(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, expanded(self.weight, x.dtype), bias)


def on_device(weight: torch.Tensor, bias: Tensor | None) -> tuple[torch.device, Tensor | None]:
    """The device of a weight's values, and the bias there."""
    return weight.device, None if bias is None else bias.to(weight.device)
