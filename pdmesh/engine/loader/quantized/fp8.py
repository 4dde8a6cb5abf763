"""Weights in fp8 (e4m3) under their plain name, with scales beside: for the tensor, for each output, or for each block.

weight            [N, K]                      float8_e4m3fn
weight_scale      [], [1], [N] or [N, 1]      float: w = weight * weight_scale
weight_scale_inv  [N / rows, K / columns]     float or e8m0, of blocks (DeepSeek-V3); in spite of its name it multiplies too,
                                                  and has one number where there are no blocks (Mistral)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pdmesh.engine.loader.quantize import in_row_blocks
from pdmesh.engine.loader.quantized.format import FLOATS, FP8, Part, Stored, WeightFormat, finish, require_shape, shape_of
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

_SCALES = FLOATS | {"F8_E8M0"}
ACTIVATIONS = "activations are computed unquantized, more exactly than the checkpoint asks for"


class Fp8(WeightFormat):
    """fp8 with a scale for a tensor or each of its outputs, or (`block`: rows, columns) for each block."""

    main = ".weight"
    ignored = r".*\.(input_scale|activation_scale|output_scale|input_scale_ub)"
    note = ACTIVATIONS

    def __init__(self, source: str, block: tuple[int, int] | None = None) -> None:
        """`source` names what wrote the checkpoint."""
        self.block = block
        self.parts: Mapping[str, Part] = {
            ".weight": Part(FP8),
            ".weight_scale_inv": Part(_SCALES, required=block is not None),
            ".weight_scale": Part(_SCALES, required=False),
        }
        self.title = f"{source} fp8 " + (
            f"in blocks of {block[0]} x {block[1]}" if block else "with a scale for each tensor or output"
        )

    def read(self, stem: str, stored: Stored, expert: int) -> Tensor:
        weight, scales = stored.tensor(f"{stem}.weight"), stored.tensor(self._scale(stem, stored))
        return dequantize_blocks(weight, scales, self.block) if self.block else dequantize_rows(weight, scales)

    def check_shapes(self, stem: str, stored: Stored) -> None:
        rows, columns = shape_of(f"{stem}.weight", stored)
        name = self._scale(stem, stored)
        if self.block:
            height, width = self.block
            require_shape(name, stored, (-(-rows // height), -(-columns // width)))
        elif stored.header(name) is None:
            raise ValueError(f"no tensor {name!r}, which {self.title} needs; the checkpoint is incomplete")
        else:
            require_shape(name, stored, (), (1,), (1, 1), (rows,), (rows, 1))

    def _scale(self, stem: str, stored: Stored) -> str:
        inverse = f"{stem}.weight_scale_inv"
        return inverse if self.block or stored.header(inverse) is not None else f"{stem}.weight_scale"


def dequantize_rows(weight: Tensor, scales: Tensor) -> Tensor:
    """Return weight [N, K] times its one scale, or its scale for each row, in the scales' dtype: rounded once."""
    factors = scales.float().reshape(-1, 1).expand(len(weight), 1)
    return in_row_blocks(weight.shape, _result(scales), lambda rows: weight[rows].float().mul_(factors[rows]))


def dequantize_blocks(weight: Tensor, scales: Tensor, block: Sequence[int]) -> Tensor:
    """Return weight [N, K] times the scale of each block, in the scales' dtype. The last blocks of either side may be short."""
    factors = scales.float().repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    block_of = torch.arange(len(weight)) // block[0]
    return in_row_blocks(weight.shape, _result(scales), lambda rows: weight[rows].float().mul_(factors[block_of[rows]]))


def _result(scales: Tensor) -> torch.dtype:
    return scales.dtype if scales.dtype.itemsize > 1 else torch.float32


def read_fp8(config: ConfigReader) -> Fp8:
    """Read a quantization_config of method fp8: by blocks where it has `weight_block_size`. Raises UnsupportedModel."""
    config.require("fmt", "e4m3", "float8_e4m3fn")
    config.require("expert_dtype", "fp8")
    config.require("scale_fmt", "float", "ue8m0")
    config.require("activation_scheme", "dynamic", "static")
    block = config.get("weight_block_size")
    read = Fp8("DeepSeek's" if block else "per-tensor", _block(block, config.name("weight_block_size")) if block else None)
    finish(config, "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize", "kv_cache_scheme")
    return read


def _block(value: object, name: str) -> tuple[int, int]:
    is_block = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)
    if not is_block:
        raise UnsupportedModel(f"{name} {value!r} is not supported; give [rows, columns]")
    assert isinstance(value, (list, tuple))
    return int(value[0]), int(value[1])


def read_fbgemm(config: ConfigReader) -> Fp8:
    """Read a quantization_config of FBGEMM (Llama 3.1 405B in fp8)."""
    finish(config, "activation_scale_ub", "modules_to_not_convert")
    return Fp8("FBGEMM's")
