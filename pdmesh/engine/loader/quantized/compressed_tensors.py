"""compressed-tensors (llm-compressor, vLLM): a scheme for each group of modules.

pack-quantized                     weight_packed      [N, K * bits / 32]  int32, code + 2^(bits - 1) in a stream of bits
                                   weight_shape       [2]                 integers: N, K
                                   weight_zero_point  [N * bits / 32, G]  int32, packed along outputs (asymmetric); int8 [N, G] in
                                                                          early versions
int-quantized, naive-quantized     weight [N, K] int8,  weight_zero_point [N, G] int8 (asymmetric)
float-quantized, naive-quantized   weight [N, K] float8_e4m3fn
all of them                        weight_scale: [1], [N, 1], [N, G] or one for each block;  weight_g_idx [K] (act-order)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.loader.quantized.format import (
    FLOATS,
    FP8,
    INTEGERS,
    Header,
    Part,
    Stored,
    WeightFormat,
    finish,
    require_shape,
    shape_of,
)
from pdmesh.engine.loader.quantized.fp8 import ACTIVATIONS, dequantize_blocks, dequantize_rows
from pdmesh.engine.loader.quantized.grid import Codes, Grid, make_grid, unpack
from pdmesh.engine.models.reader import ConfigReader, UnsupportedModel

_PACKED, _PLAIN = ".weight_packed", ".weight"
_INTEGER_FORMATS = ("int-quantized", "naive-quantized")
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_INDEX = frozenset({"I32", "I64"})


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are stored."""

    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group: int  # of strategy group
    block: tuple[int, int]  # of strategy block
    act_order: bool  # columns of one group do not lie side by side
    activations: bool  # are quantized too

    @property
    def main(self) -> str:
        return _PACKED if self.format == "pack-quantized" else _PLAIN

    @property
    def name(self) -> str:
        """Return a name such as `int4 in groups of 128`."""
        kind = "fp8" if self.is_float else f"int{self.bits}"
        where = {"group": f"in groups of {self.group}", "block": f"in blocks of {self.block[0]} x {self.block[1]}"}
        return f"{kind} {where.get(self.strategy, f'by {self.strategy}')}"

    def parts(self) -> dict[str, Part]:
        """Return the tensors that make one weight."""
        scale = {".weight_scale": Part(FLOATS)}
        if self.is_float:
            return {_PLAIN: Part(FP8), **scale}
        own = {".weight_g_idx": Part(INTEGERS, required=self.act_order)}
        if self.main == _PLAIN:
            zero = {} if self.symmetric else {".weight_zero_point": Part(frozenset({"I8"}))}
            return {_PLAIN: Part(frozenset({"I8"})), **scale, **zero, **own}
        zero = {} if self.symmetric else {".weight_zero_point": Part(INTEGERS | {"I8"})}
        return {_PACKED: Part(INTEGERS), ".weight_shape": Part(_INDEX), **scale, **zero, **own}

    def scale_shapes(self, rows: int, width: int) -> list[tuple[int, ...]]:
        """Return the shapes that scales may have for a weight of this shape."""
        if self.strategy in ("tensor", "channel"):
            return [(1,), (), (1, 1)] if self.strategy == "tensor" else [(rows, 1), (rows,)]
        height, size = (1, self.group) if self.strategy == "group" else self.block
        return [(-(-rows // height), -(-width // size))]

    def is_meant_for(self, module: str) -> bool:
        return any(target == "Linear" or _matches(module, target) for target in self.targets)


def _matches(module: str, target: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else module == target


class CompressedTensors(WeightFormat):
    """Schemes by module. A module's stored dtype has to be its scheme's."""

    main = _PACKED
    parts: Mapping[str, Part] = {
        ending: Part(frozenset())
        for ending in (_PACKED, ".weight_shape", ".weight_scale", ".weight_zero_point", ".weight_g_idx", _PLAIN)
    }
    ignored = r".*\.((input|output)_(scale|zero_point)|(q|k|v)_(scale|zero_point))"

    def __init__(self, schemes: tuple[Scheme, ...], ignore: tuple[str, ...]) -> None:
        self.schemes, self.ignore = schemes, ignore
        self.title = "compressed-tensors " + ", ".join(dict.fromkeys(scheme.name for scheme in schemes))
        self.group = schemes[0].group if len(schemes) == 1 else 0
        self.note = ACTIVATIONS if any(scheme.activations for scheme in schemes) else ""

    def scheme_of(self, stem: str) -> Scheme | None:
        """Return the module's scheme: the first whose targets name it, unless it is to be ignored."""
        if any(_matches(stem, pattern) for pattern in self.ignore):
            return None
        return next((scheme for scheme in self.schemes if scheme.is_meant_for(stem)), None)

    def holds(self, stem: str, stored: Stored) -> bool:
        plain = stored.header(stem + _PLAIN)
        return stored.header(stem + _PACKED) is not None or (plain is not None and plain.dtype not in FLOATS)

    def check(self, stored: Stored) -> None:
        for stem in self.stems(stored):
            if self.scheme_of(stem) is None:
                raise UnsupportedModel(f"{stem}: its weight is quantized, and no config group of quantization_config targets it")
        super().check(stored)

    def parts_of(self, stem: str) -> Mapping[str, Part]:
        return self._scheme(stem).parts()

    def _scheme(self, stem: str) -> Scheme:
        scheme = self.scheme_of(stem)
        assert scheme is not None, "checked when the checkpoint was opened"
        return scheme

    def num_weights(self, name: str, header: Header) -> int:
        packed = name.endswith(_PACKED)
        if not packed:
            return (
                super().num_weights(name, header) if not name.endswith(_PLAIN) else header.shape[0] * _product(header.shape[1:])
            )
        return header.shape[0] * header.shape[1] * 32 // self._scheme(name.removesuffix(_PACKED)).bits

    def shape(self, stem: str, stored: Stored) -> tuple[int, ...]:
        if self._scheme(stem).main == _PLAIN:
            return shape_of(stem + _PLAIN, stored)
        return tuple(int(size) for size in stored.tensor(f"{stem}.weight_shape"))

    def check_shapes(self, stem: str, stored: Stored) -> None:
        scheme = self._scheme(stem)
        rows, columns = shape_of(stem + scheme.main, stored)
        width = columns * 32 // scheme.bits if scheme.main == _PACKED else columns  # of packed: up to the padding of a word
        scales = scheme.scale_shapes(rows, width)
        require_shape(f"{stem}.weight_scale", stored, *scales)
        groups = scales[0][-1] if len(scales[0]) == 2 else 1
        zero = stored.header(f"{stem}.weight_zero_point")
        if not scheme.symmetric and zero is not None:
            zeros = [(-(-rows * scheme.bits // 32), groups)] if zero.dtype == "I32" else scales
            require_shape(f"{stem}.weight_zero_point", stored, *zeros)
        require_shape(f"{stem}.weight_g_idx", stored, (width,))

    def read(self, stem: str, stored: Stored, expert: int) -> Codes | Tensor:
        scheme = self._scheme(stem)
        scales = stored.tensor(f"{stem}.weight_scale")
        if scheme.is_float:
            weight = stored.tensor(f"{stem}.weight")
            return (
                dequantize_blocks(weight, scales, scheme.block) if scheme.strategy == "block" else dequantize_rows(weight, scales)
            )
        return self._grid(stem, stored, scheme, scales)

    def _grid(self, stem: str, stored: Stored, scheme: Scheme, scales: Tensor) -> Grid:
        middle = 1 << (scheme.bits - 1)
        codes = _packed(stem, stored, scheme.bits) if scheme.main == _PACKED else _plain(stem, stored, scheme.bits)
        scales = scales.reshape(-1, 1).expand(len(codes), 1) if scheme.strategy in ("tensor", "channel") else scales
        zeros = self._zeros(stem, stored, scheme, scales.shape) + middle
        index = _index(f"{stem}.weight_g_idx", stored, scales.shape[1])
        group = scheme.group if scheme.strategy == "group" else 0
        return make_grid(codes, scales, zeros, bits=scheme.bits, group=group, index=index)

    def _zeros(self, stem: str, stored: Stored, scheme: Scheme, shape: torch.Size) -> Tensor:
        """Return the distance of each zero from the middle code; 0 for a symmetric scheme, which may store them all the same."""
        name, middle = f"{stem}.weight_zero_point", 1 << (scheme.bits - 1)
        zeros = stored.tensor(name) if stored.header(name) is not None else torch.zeros(shape, dtype=torch.int8)
        if zeros.dtype == torch.int32:
            zeros = unpack(zeros.t(), scheme.bits).t()[: shape[0]].short() - middle
        if scheme.symmetric and bool(zeros.any()):
            raise ValueError(f"{name}: it is not 0, and quantization_config says that weights are symmetric; it is damaged")
        return zeros.reshape(-1, shape[1]).expand(shape).short()


def _index(name: str, stored: Stored, groups: int) -> Tensor | None:
    """Return each column's group; None where columns are in order, which -1 says too."""
    if stored.header(name) is None:
        return None
    index = stored.tensor(name)
    if index.numel() and not -1 <= int(index.min()) <= int(index.max()) < groups:
        raise ValueError(f"{name}: groups from {int(index.min())} to {int(index.max())}, and there are {groups}; it is damaged")
    return None if bool((index == -1).any()) else index


def _packed(stem: str, stored: Stored, bits: int) -> Tensor:
    rows, width = (int(size) for size in stored.tensor(f"{stem}.weight_shape"))
    codes = unpack(stored.tensor(f"{stem}{_PACKED}"), bits)
    if rows != len(codes) or not width <= codes.shape[1] < width + 32 // bits:
        raise ValueError(f"{stem}.weight_packed: {tuple(codes.shape)} codes in the checkpoint, ({rows}, {width}) by weight_shape")
    return codes[:, :width].contiguous()


def _plain(stem: str, stored: Stored, bits: int) -> Tensor:
    """Return the codes of values that are stored as int8, whatever bits they need."""
    values, middle = stored.tensor(f"{stem}{_PLAIN}"), 1 << (bits - 1)
    if bits < 8 and values.numel() and not -middle <= int(values.min()) <= int(values.max()) < middle:
        raise ValueError(f"{stem}.weight: values from {int(values.min())} to {int(values.max())} have more than {bits} bits")
    return (values.short() + middle).to(torch.uint8)


def _product(sizes: tuple[int, ...]) -> int:
    return sizes[0] if sizes else 1


# Reading of quantization_config


def read_compressed_tensors(config: ConfigReader) -> CompressedTensors | None:
    """Read a quantization_config. None: weights are plain, and only scales of KV in fp8 were added
    (pdmesh/engine/loader/kv_scales.py). Raises UnsupportedModel, naming the key."""
    sparsity = config.section("sparsity_config")
    if sparsity is not None:
        sparsity.require("format", "dense")
        sparsity.ignore(*sparsity)
    _check_kv(config.section("kv_cache_scheme"))
    groups = config.section("config_groups")
    layout, ignore = str(config.get("format") or "pack-quantized"), tuple(config.texts("ignore") or ())
    if config.get("transform_config"):
        raise UnsupportedModel(f"{config.name('transform_config')}: weights that were rotated are not supported")
    schemes = [] if groups is None else [_scheme(groups.section(key), layout) for key in groups.sections()]
    if not schemes and config.get("kv_cache_scheme") is None:
        raise UnsupportedModel(f"{config.name('config_groups')} is empty; it has to say how weights are quantized")
    finish(config, "version", "quantization_status", "global_compression_ratio")
    return CompressedTensors(tuple(schemes), ignore) if schemes else None


def _check_kv(scheme: ConfigReader | None) -> None:
    """Scales of keys and values are read for pools in fp8; other kinds have to be refused."""
    if scheme is None:
        return
    scheme.require("num_bits", 8)
    scheme.require("type", "float")
    scheme.require("strategy", "tensor")
    scheme.require("symmetric", True)
    scheme.require("dynamic", False)
    scheme.ignore(*scheme)


def _scheme(group: ConfigReader | None, layout: str) -> Scheme:
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise UnsupportedModel("quantization_config.config_groups: a group without quantized weights is not supported")
    layout = str(group.get("format") or layout)
    if layout not in _FORMATS:
        raise UnsupportedModel(f"{group.name('format')} {layout!r} is not supported; this engine reads {', '.join(_FORMATS)}")
    is_float, strategy = str(weights.get("type") or "int") == "float", _strategy(weights)
    _check_bits(weights, layout, is_float)
    _check_strategy(weights, strategy, is_float)
    group.ignore("input_activations", "output_activations")
    return Scheme(
        targets=_targets(group),
        format=layout,
        bits=weights.count("num_bits", default=8),
        is_float=is_float,
        symmetric=weights.flag("symmetric", True),
        strategy=strategy,
        group=weights.optional_count("group_size") or 0 if strategy == "group" else 0,
        block=_block(weights, strategy),
        act_order=weights.get("actorder") in (True, "group", "dynamic"),
        activations=bool(group.get("input_activations") or group.get("output_activations")),
    )


def _targets(group: ConfigReader) -> tuple[str, ...]:
    targets = tuple(group.texts("targets") or ())
    classes = [name for name in targets if name != "Linear" and not name.startswith("re:") and name[:1].isupper()]
    if classes or not targets:
        raise UnsupportedModel(f"{group.name('targets')} {', '.join(classes)}: give Linear, names of modules, or patterns (re:)")
    return targets


def _check_bits(weights: ConfigReader, layout: str, is_float: bool) -> None:
    weights.require("type", "int", "float")
    weights.require("dynamic", False)
    bits, kind = weights.count("num_bits", default=8), "float" if is_float else "int"
    if bits not in _allowed_bits(layout, is_float):
        what = f"{layout} with {bits} bits of type {kind}"
        raise UnsupportedModel(f"{weights.name('num_bits')}: {what} is not supported; this engine reads {_bits_text(layout)}")


def _check_strategy(weights: ConfigReader, strategy: str, is_float: bool) -> None:
    weights.require("strategy", *_STRATEGIES)
    if strategy == "group" and (is_float or not weights.optional_count("group_size")):
        what = "fp8 in groups is not supported" if is_float else "strategy group needs it"
        raise UnsupportedModel(f"{weights.name('group_size')}: {what}")
    if strategy == "block" and not is_float:
        raise UnsupportedModel(f"{weights.name('strategy')}: blocks of integers are not supported")
    if is_float and not weights.flag("symmetric", True):
        raise UnsupportedModel(f"{weights.name('symmetric')}: fp8 with zero points is not supported")
    # What is left says how the codes were found, which changes none of them.
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "group_size", "block_structure", "actorder")


def _strategy(weights: ConfigReader) -> str:
    default = {None: "tensor", -1: "channel"}.get(weights.get("group_size"), "group")  # type: ignore[call-overload]
    return str(weights.get("strategy") or default)


def _allowed_bits(layout: str, is_float: bool) -> tuple[int, ...]:
    if is_float:
        return (8,) if layout in _FLOAT_FORMATS else ()
    return (2, 4, 8) if layout == "pack-quantized" else (4, 8) if layout in _INTEGER_FORMATS else ()


def _bits_text(layout: str) -> str:
    return {
        "pack-quantized": "2, 4 or 8 bits of integers",
        "int-quantized": "4 or 8 bits of integers",
        "float-quantized": "8 bits (fp8)",
        "naive-quantized": "8 bits, or 4 of integers",
    }[layout]


def _block(weights: ConfigReader, strategy: str) -> tuple[int, int]:
    if strategy != "block":
        return 1, 1
    value = weights.get("block_structure")
    if isinstance(value, str):  # "128x128" in early versions
        value = [int(size) for size in value.split("x") if size.isdigit()]
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value)):
        raise UnsupportedModel(f"{weights.name('block_structure')} {value!r} is not supported; give [rows, columns]")
    return int(value[0]), int(value[1])
