"""Weights in fp8 (e4m3) under their plain name, with scales beside: for the tensor, for each output, or for each block.

weight            [N, K]                      float8_e4m3fn
weight_scale      [], [1], [N] or [N, 1]      float: w = weight * weight_scale
weight_scale_inv  [N / rows, K / columns]     float or e8m0, of blocks (DeepSeek-V3); in spite of its name it multiplies too
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
        self.scale = ".weight_scale_inv" if block else ".weight_scale"
        self.parts: Mapping[str, Part] = {".weight": Part(FP8), self.scale: Part(_SCALES)}
        self.title = f"{source} fp8 " + (
            f"in blocks of {block[0]} x {block[1]}" if block else "with a scale for each tensor or output"
        )

    def read(self, stem: str, stored: Stored, expert: int) -> Tensor:
        weight, scales = stored.tensor(f"{stem}.weight"), stored.tensor(stem + self.scale)
        return dequantize_blocks(weight, scales, self.block) if self.block else dequantize_rows(weight, scales)

    def check_shapes(self, stem: str, stored: Stored) -> None:
        rows, columns = shape_of(f"{stem}.weight", stored)
        if self.block:
            height, width = self.block
            require_shape(stem + self.scale, stored, (-(-rows // height), -(-columns // width)))
        else:
            require_shape(stem + self.scale, stored, (), (1,), (1, 1), (rows,), (rows, 1))


def dequantize_rows(weight: Tensor, scales: Tensor) -> Tensor:
    """Return weight [N, K] times its one scale, or its scale for each row, in the scales' dtype: rounded once."""
    return (weight.float() * scales.float().reshape(-1, 1)).to(_result(scales))


def dequantize_blocks(weight: Tensor, scales: Tensor, block: Sequence[int]) -> Tensor:
    """Return weight [N, K] times the scale of each block, in the scales' dtype. The last blocks of either side may be short."""
    by_column = scales.float().repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    dense = weight.float()
    for index, factors in enumerate(by_column):
        dense[index * block[0] : (index + 1) * block[0]] *= factors
    return dense.to(_result(scales))


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
