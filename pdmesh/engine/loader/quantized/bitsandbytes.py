"""bitsandbytes (Dettmers et al., 2021 to 2023): 4 bits by a table of 16 numbers (nf4, fp4), 8 bits with a scale for each output.

4 bits:  weight                [N * K / 2, 1]  two codes a byte, the first in the high half; bytes of any dtype
         weight.absmax         [blocks]        float32; with double quantization uint8, codes of a table of its own
         weight.quant_map      [16]            float32: the table
         weight.nested_absmax, weight.nested_quant_map    float32: scales and table of `absmax`
         weight.quant_state.bitsandbytes__nf4  uint8: JSON with shape, dtype, block sizes, the offset of `absmax`
8 bits:  weight [N, K] int8,  SCB [N] float32,  weight_format: 0, rows one after the other
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight, in_row_blocks
from pdmesh.engine.loader.quantized.format import FLOATS, FP8, Header, Part, Stored, WeightFormat, finish, require_shape, shape_of
from pdmesh.engine.loader.quantized.grid import look_up
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

_F32, _U8 = frozenset({"F32"}), frozenset({"U8"})
_STORAGE = FLOATS | FP8 | _U8 | {"I8"}  # a training framework may ask for codes that look like its own numbers
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_INERT = (
    "_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
    "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules",
    "llm_int8_threshold", "bnb_4bit_quant_type",
)  # fmt: skip


class Bitsandbytes4(WeightFormat):
    """nf4 or fp4, with double quantization or without."""

    main = ".weight"

    def __init__(self, kind: str) -> None:
        self.title = f"bitsandbytes {kind}"
        self._state = f".weight.quant_state.bitsandbytes__{kind}"
        self.parts: Mapping[str, Part] = {
            ".weight": Part(_STORAGE),
            ".weight.absmax": Part(_F32 | _U8),
            ".weight.quant_map": Part(_F32),
            ".weight.nested_absmax": Part(_F32, required=False),
            ".weight.nested_quant_map": Part(_F32, required=False),
            self._state: Part(_U8),
        }

    def holds(self, stem: str, stored: Stored) -> bool:
        return stored.header(stem + self._state) is not None and super().holds(stem, stored)

    def num_weights(self, name: str, header: Header) -> int:
        widths = {"U8": 2, "I8": 2, "F8_E4M3": 2, "F16": 4, "BF16": 4, "F32": 8, "F64": 16}
        is_packed = name.endswith(self.main) and len(header.shape) == 2 and header.shape[1] == 1
        return super().num_weights(name, header) * (widths[header.dtype] if is_packed else 1)

    def shape(self, stem: str, stored: Stored) -> tuple[int, ...]:
        return _State.parse(stem + self._state, stored.tensor(stem + self._state)).shape

    def check_shapes(self, stem: str, stored: Stored) -> None:
        require_shape(f"{stem}.weight.quant_map", stored, (16,))
        absmax = stored.header(f"{stem}.weight.absmax")
        if absmax is not None and absmax.dtype == "U8" and stored.header(f"{stem}.weight.nested_absmax") is None:
            raise ValueError(
                f"no tensor '{stem}.weight.nested_absmax', which absmax in 8 bits needs; the checkpoint is incomplete"
            )

    def read(self, stem: str, stored: Stored, expert: int) -> Tensor:
        state = _State.parse(stem + self._state, stored.tensor(stem + self._state))
        absmax = self._absmax(stem, stored, state)
        codes = stored.tensor(f"{stem}.weight").contiguous().view(torch.uint8).flatten()
        table = stored.tensor(f"{stem}.weight.quant_map")
        count = state.shape[0] * state.shape[1]
        if 2 * len(codes) < count or len(absmax) != -(-count // state.block):
            have = f"{2 * len(codes)} codes and {len(absmax)} scales"
            raise ValueError(
                f"{stem}.weight: {have} in the checkpoint, {state.shape} in blocks of {state.block} by its quant_state"
            )
        return _look_up_scaled(codes, table, absmax, state.block, state.dtype).flatten()[:count].view(state.shape)

    def _absmax(self, stem: str, stored: Stored, state: _State) -> Tensor:
        absmax = stored.tensor(f"{stem}.weight.absmax")
        if absmax.dtype != torch.uint8:
            return absmax
        table, scales = (stored.tensor(f"{stem}.weight.nested_{part}") for part in ("quant_map", "absmax"))
        if len(scales) != -(-len(absmax) // state.nested_block):
            raise ValueError(f"{stem}.weight.nested_absmax: {len(scales)} scales for {len(absmax)} numbers; it is damaged")
        return table[absmax.int()] * scales.repeat_interleave(state.nested_block)[: len(absmax)] + state.nested_offset


def _look_up_scaled(codes: Tensor, table: Tensor, absmax: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return [blocks, block]: the last may have numbers too many."""
    codes = F.pad(codes, (0, len(absmax) * block // 2 - len(codes))).view(len(absmax), -1)

    def some(blocks: slice) -> Tensor:
        return look_up(codes[blocks], table, high_first=True).flatten(1).mul_(absmax[blocks, None])

    return in_row_blocks((len(absmax), block), dtype, some)


@dataclass(frozen=True)
class _State:
    """What bitsandbytes keeps of one weight as JSON."""

    shape: tuple[int, int]
    dtype: torch.dtype
    block: int
    nested_block: int
    nested_offset: float

    @classmethod
    def parse(cls, name: str, content: Tensor) -> _State:
        """Raises ValueError naming the tensor."""
        try:
            state = json.loads(bytes(content.numpy()).decode())
            rows, columns = state["shape"]
            nested = (int(state.get("nested_blocksize", 1)), float(state.get("nested_offset", 0.0)))
            return cls((int(rows), int(columns)), _DTYPES[state["dtype"]], int(state["blocksize"]), *nested)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name}: it is no state of a 4-bit weight ({error!r}); the checkpoint is damaged") from error


class Bitsandbytes8(WeightFormat):
    """LLM.int8(): a scale for each output, as 127 times that of other formats."""

    title = "bitsandbytes int8"
    main = ".weight"
    parts: Mapping[str, Part] = {
        ".weight": Part(frozenset({"I8"})),
        ".SCB": Part(_F32),
        ".weight_format": Part(_U8, required=False),
    }
    note = "activations are computed without the outlier columns that LLM.int8() takes apart"

    def check_shapes(self, stem: str, stored: Stored) -> None:
        rows, _ = shape_of(f"{stem}.weight", stored)
        require_shape(f"{stem}.SCB", stored, (rows,))

    def read(self, stem: str, stored: Stored, expert: int) -> ScaledRows:
        if stored.header(f"{stem}.weight_format") is not None and bool(stored.tensor(f"{stem}.weight_format").any()):
            raise UnsupportedModel(f"{stem}.weight_format: only the order of rows (0) is supported")
        return ScaledRows(stored.tensor(f"{stem}.weight"), stored.tensor(f"{stem}.SCB"))


@dataclass(frozen=True)
class ScaledRows:
    """w[n, k] = values[n, k] * SCB[n] / 127, the division as bitsandbytes does it (see Codes)."""

    values: Tensor  # [N, K] int8
    scb: Tensor  # [N] float32

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def rows(self, picked: Tensor) -> ScaledRows:
        return replace(self, values=self.values[picked], scb=self.scb[picked])

    def dequantize(self) -> Tensor:
        return self.values * self.scb[:, None] * _OVER_127

    def int4(self, group: int) -> Int4Weight | None:
        return None

    def int8(self) -> Int8Weight | None:
        return Int8Weight(self.values, self.scb * _OVER_127)


_OVER_127 = 7.874015718698502e-3


def read_bitsandbytes(config: ConfigReader) -> WeightFormat:
    """Read a quantization_config of bitsandbytes. Raises UnsupportedModel, naming the key."""
    four, eight = (config.flag(key) or config.flag(f"_{key}") for key in ("load_in_4bit", "load_in_8bit"))
    if four == eight:
        raise UnsupportedModel(
            f"{config.name('load_in_4bit')}: bitsandbytes has either 4 or 8 bits; config.json says {four}, {eight}"
        )
    kind = str(config.get("bnb_4bit_quant_type") or "fp4")
    if four and kind not in ("nf4", "fp4"):
        raise UnsupportedModel(f"{config.name('bnb_4bit_quant_type')} {kind!r} is not supported; this engine reads nf4 and fp4")
    finish(config, *_INERT)
    return Bitsandbytes4(kind) if four else Bitsandbytes8()
