"""AWQ (Lin et al., 2023) in AutoAWQ's gemm layout.

qweight [K, N / 8]  int32   codes of one input, packed along outputs; in a word outputs lie as 0 2 4 6 1 3 5 7
qzeros  [G, N / 8]  int32   likewise
scales  [G, N]      float
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pdmesh.engine.loader.quantized.format import (
    FLOATS,
    INTEGERS,
    Header,
    Part,
    Stored,
    WeightFormat,
    finish,
    group_size,
    require_shape,
    shape_of,
)
from pdmesh.engine.loader.quantized.grid import Grid, make_grid, unpack
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

_PER_WORD = 8
_NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)  # output i of a word lies in nibble _NIBBLE_OF[i]
_INERT = (
    "backend", "modules_to_not_convert", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", "model_seqlen",
    "desc_act", "sym", "meta", "damp_percent", "true_sequential", "model_name_or_path", "model_file_base_name", "duo_scaling",
    "dataset", "tokenizer", "batch_size", "pad_token_id", "lm_head",
)  # fmt: skip


class Awq(WeightFormat):
    """AWQ with 4 bits."""

    main = ".qweight"
    parts: Mapping[str, Part] = {".qweight": Part(INTEGERS), ".qzeros": Part(INTEGERS), ".scales": Part(FLOATS)}

    def __init__(self, group: int) -> None:
        """`group` 0: an output has one scale."""
        self.group = group
        self.title = "AWQ, 4 bits " + (f"in groups of {group}" if group else "with a scale for each output")

    def read(self, stem: str, stored: Stored, expert: int) -> Grid:
        codes, zeros = (_in_order(unpack(stored.tensor(stem + part), 4)) for part in (".qweight", ".qzeros"))
        scales = stored.tensor(f"{stem}.scales")
        return make_grid(codes.t().contiguous(), scales.t(), zeros.t(), bits=4, group=self.group)

    def num_weights(self, name: str, header: Header) -> int:
        return super().num_weights(name, header) * (_PER_WORD if name.endswith(self.main) else 1)

    def shape(self, stem: str, stored: Stored) -> tuple[int, ...]:
        inputs, words = shape_of(f"{stem}.qweight", stored)
        return words * _PER_WORD, inputs

    def check_shapes(self, stem: str, stored: Stored) -> None:
        inputs, words = shape_of(f"{stem}.qweight", stored)
        groups = -(-inputs // self.group) if self.group else 1
        require_shape(f"{stem}.scales", stored, (groups, words * _PER_WORD))
        require_shape(f"{stem}.qzeros", stored, (groups, words))


def _in_order(nibbles: Tensor) -> Tensor:
    return nibbles.view(len(nibbles), -1, _PER_WORD)[:, :, list(_NIBBLE_OF)].flatten(1)


def read_awq(config: ConfigReader) -> Awq:
    """Read a quantization_config of AWQ. Raises UnsupportedModel, naming the key."""
    config.require("bits", 4)
    config.require("w_bit", 4)
    layout = str(config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm").lower()
    config.ignore("version", "format", "checkpoint_format")
    if layout != "gemm":
        raise UnsupportedModel(f"{config.name('version')} {layout!r} is not supported; this engine reads AWQ's gemm layout")
    config.require("zero_point", True)
    config.require("pack_dtype", "int32")
    if config.get("dynamic"):
        raise UnsupportedModel(f"{config.name('dynamic')}: modules with other bits or groups are not supported")
    group = group_size(config, "group_size", "q_group_size")
    finish(config, *_INERT)
    return Awq(group)
