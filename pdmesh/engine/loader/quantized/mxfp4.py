"""MXFP4 (OCP Microscaling formats 1.0), as GPT-OSS stores its experts: blocks of 32 numbers in e2m1 with one power of two.

NAME_blocks  [experts, out, K / 32, 16]  uint8   two numbers a byte, the first in the low half
NAME_scales  [experts, out, K / 32]      uint8   exponent + 127
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pdmesh.engine.loader.quantize import in_row_blocks
from pdmesh.engine.loader.quantized.format import Header, Part, Stored, WeightFormat, finish, require_shape, shape_of
from pdmesh.engine.loader.quantized.grid import look_up
from pdmesh.engine.models.reader import ConfigReader

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BYTES = frozenset({"U8"})


class Mxfp4(WeightFormat):
    """MXFP4 of stacked experts. A weight comes out [experts, in, out], as the plain tensors of this family are."""

    title = "MXFP4 (blocks of 32 in e2m1)"
    main = "_blocks"
    parts: Mapping[str, Part] = {"_blocks": Part(_BYTES), "_scales": Part(_BYTES)}

    def read(self, stem: str, stored: Stored, expert: int) -> Tensor:
        """Return the weights of one expert; all others' places in the result show the same memory."""
        blocks, scales = stored.tensor(f"{stem}_blocks"), stored.tensor(f"{stem}_scales")
        if not 0 <= expert < len(blocks):
            raise ValueError(f"{stem}_blocks: {len(blocks)} experts in the checkpoint, and number {expert} was asked for")
        return dequantize_mxfp4(blocks[expert], scales[expert]).t().expand(expert + 1, -1, -1)

    def shape(self, stem: str, stored: Stored) -> tuple[int, ...]:
        experts, outputs, blocks, _ = shape_of(f"{stem}_blocks", stored, dims=4)
        return experts, blocks * 32, outputs

    def num_weights(self, name: str, header: Header) -> int:
        return super().num_weights(name, header) * (2 if name.endswith(self.main) else 1)

    def check_shapes(self, stem: str, stored: Stored) -> None:
        *blocks, size = shape_of(f"{stem}_blocks", stored, dims=4)
        if size != 16:
            raise ValueError(f"{stem}_blocks: {size} bytes a block in the checkpoint; MXFP4 has 16")
        require_shape(f"{stem}_scales", stored, blocks)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [out, K] bfloat16, which holds every number of MXFP4 but its smallest, of blocks [out, K / 32, 16] and scales
    [out, K / 32]."""
    table = torch.tensor([*_E2M1, *(-number for number in _E2M1)], dtype=torch.bfloat16)
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.bfloat16), scales.int() - 127)[:, :, None]

    def some(rows: slice) -> Tensor:
        return look_up(blocks[rows], table).flatten(2).mul_(factors[rows]).flatten(1)

    return in_row_blocks((len(blocks), blocks.shape[1] * 32), torch.bfloat16, some)


def read_mxfp4(config: ConfigReader) -> Mxfp4:
    """Read a quantization_config of MXFP4."""
    finish(config, "modules_to_not_convert", "dequantize")
    return Mxfp4()
