"""GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel store it.

    qweight [K * bits / 32, N]  int32   codes of one output, packed along its inputs
    qzeros  [G, N * bits / 32]  int32   packed along outputs; version 1 stores zero - 1, version 2 (`gptq_v2`) the zero itself
    scales  [G, N]              float
    g_idx   [K]                 int32   the group of each input; with act-order (`desc_act`) they are in no order

3 bits are a stream too: 32 codes in 3 words.
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

_BITS = (2, 3, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}
_INERT = (
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset",
    "desc_act", "disable_exllama", "exllama_config", "hyb_act", "is_marlin_format", "max_input_length", "meta",
    "mock_quantization", "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "offload_to_disk", "offload_to_disk_path", "pad_token_id", "quantizer", "rotation",
    "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2", "lm_head", "act_group_aware",
    "act_order", "hessian", "failsafe", "fallback", "adapter", "pack_impl",
)  # fmt: skip


class Gptq(WeightFormat):
    """GPTQ with one number of bits and one group size for all weights."""

    main = ".qweight"
    parts: Mapping[str, Part] = {
        ".qweight": Part(INTEGERS),
        ".qzeros": Part(INTEGERS),
        ".scales": Part(FLOATS),
        ".g_idx": Part(INTEGERS, required=False),
    }

    def __init__(self, bits: int, group: int, zero_offset: int) -> None:
        """`group` 0: an output has one scale. `zero_offset` is added to stored zeros."""
        self.bits, self.group, self.zero_offset = bits, group, zero_offset
        self.title = f"GPTQ, {bits} bits " + (f"in groups of {group}" if group else "with a scale for each output")

    def read(self, stem: str, stored: Stored, expert: int) -> Grid:
        codes = unpack(stored.tensor(f"{stem}.qweight").t(), self.bits)
        zeros = unpack(stored.tensor(f"{stem}.qzeros"), self.bits).short() + self.zero_offset
        index = self._index(stem, stored)
        return make_grid(codes, stored.tensor(f"{stem}.scales").t(), zeros.t(), bits=self.bits, group=self.group, index=index)

    def _index(self, stem: str, stored: Stored) -> Tensor | None:
        name = f"{stem}.g_idx"
        if stored.header(name) is None:
            return None
        index, groups = stored.tensor(name), shape_of(f"{stem}.scales", stored)[0]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise ValueError(
                f"{name}: groups from {int(index.min())} to {int(index.max())}, and there are {groups}; it is damaged"
            )
        return index

    def shape(self, stem: str, stored: Stored) -> tuple[int, ...]:
        words, outputs = shape_of(f"{stem}.qweight", stored)
        return outputs, words * 32 // self.bits

    def num_weights(self, name: str, header: Header) -> int:
        return super().num_weights(name, header) * (32 if name.endswith(self.main) else self.bits) // self.bits

    def check_shapes(self, stem: str, stored: Stored) -> None:
        outputs, inputs = self.shape(stem, stored)
        groups = -(-inputs // self.group) if self.group else 1
        require_shape(f"{stem}.scales", stored, (groups, outputs))
        require_shape(f"{stem}.qzeros", stored, (groups, outputs * self.bits // 32))
        require_shape(f"{stem}.g_idx", stored, (inputs,), (0,))


def read_gptq(config: ConfigReader) -> Gptq:
    """Read a quantization_config of GPTQ. Raises UnsupportedModel, naming the key."""
    config.require("bits", *_BITS)
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if layout not in _FORMATS:
        raise UnsupportedModel(f"{config.name('checkpoint_format')} {layout!r} is not supported; give gptq or gptq_v2")
    config.ignore("format", "checkpoint_format")
    config.require("pack_dtype", "int32")
    config.require("method", "gptq")
    config.require("is_marlin_format", False)
    _check_overrides(config.get("dynamic"), config.name("dynamic"))
    group = group_size(config, "group_size")
    read = Gptq(config.count("bits"), group, _FORMATS[layout])
    finish(config, *_INERT)
    return read


def _check_overrides(dynamic: object, name: str) -> None:
    """Accept modules left plain ("-:"), which their tensors show; refuse modules with bits or groups of their own."""
    if not dynamic:
        return
    rules = dynamic if isinstance(dynamic, Mapping) else {str(dynamic): {}}
    own = [pattern for pattern in rules if not str(pattern).startswith("-:")]
    if own:
        raise UnsupportedModel(f"{name}: {', '.join(map(str, own))}: modules with other bits or groups are not supported")
