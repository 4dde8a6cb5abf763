"""Tiny quantized checkpoints: a plain folder's linear maps in each format, written from the formats' descriptions.

Codes are packed bit by bit in numpy and dequantized by each format's own formula, so that nothing here shares code with the
loader. `write_quantized` leaves two folders: the quantized one, and one with the weights that it stands for.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by their endings, and the weight [out, in] that they stand for."""

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]
FP4 = FP4 + [-number for number in FP4]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Format:
    """A format with one choice of its settings. `pack` gets the module's name and its weight."""

    config: dict[str, Any]
    pack: Callable[[str, Tensor], Written]
    side_file: str = ""  # where the settings stand in a file of their own instead of config.json
    skipped: str = r"lm_head"  # a pattern of modules that stay plain
    extra: Callable[[str], dict[str, Tensor]] = field(default=lambda name: {})


# Codes and words


def stream(codes: np.ndarray, bits: int) -> Any:
    """Pack each row of codes into int32 words, the first code in the lowest bits; the last word is filled with zeros."""
    rows, width = codes.shape
    flat = ((codes[:, :, None] >> np.arange(bits)) & 1).reshape(rows, width * bits).astype(np.uint64)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    words = (flat.reshape(rows, -1, 32) << np.arange(32, dtype=np.uint64)).sum(2)
    return np.ascontiguousarray(words.astype(np.uint32)).view(np.int32)


def quantized(weight: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype, index: Tensor | None = None) -> Any:
    """Return codes [N, K], scales [N, G] and zeros [N, G] of the nearest codes, with zeros from 1 on (GPTQ stores zero - 1)."""
    rows, width = weight.shape
    index = torch.arange(width) // (group or width) if index is None else index
    scales, zeros = (
        torch.empty(rows, int(index.max()) + 1, dtype=dtype),
        torch.empty(rows, int(index.max()) + 1, dtype=torch.int64),
    )
    top = 2**bits - 1
    for number in range(scales.shape[1]):
        part = weight[:, index == number].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, number] = (2 * torch.maximum(high, -low) / top).to(dtype)
            zeros[:, number] = (top + 1) // 2
        else:
            scales[:, number] = ((high - low) / top).to(dtype)
            zeros[:, number] = (-low / scales[:, number].float()).round().clamp(1, top)
    codes = (weight.float() / scales.float()[:, index] + zeros[:, index]).round().clamp(0, top).to(torch.int64)
    return codes, scales, zeros, index


def on_grid(codes: Tensor, scales: Tensor, zeros: Tensor, index: Tensor) -> Tensor:
    """Dequantize as the packages do: in the dtype of the scales."""
    return (codes - zeros[:, index]).to(scales.dtype) * scales[:, index]


def words(codes: Tensor, bits: int) -> Tensor:
    return torch.from_numpy(stream(codes.numpy(), bits).copy())


# GPTQ and AWQ


def act_order(name: str, width: int, group: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return (torch.arange(width) // group)[torch.randperm(width, generator=generator)]


def gptq(
    bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, version: int = 1, has_index: bool = True
) -> Format:
    def pack(name: str, weight: Tensor) -> Written:
        index = act_order(name, weight.shape[1], group) if ordered else None
        codes, scales, zeros, index = quantized(weight, bits, group, symmetric=symmetric, dtype=torch.float16, index=index)
        stored = {
            ".qweight": words(codes, bits).t().contiguous(),
            ".qzeros": words(zeros.t().contiguous() - (1 if version == 1 else 0), bits),
            ".scales": scales.t().contiguous(),
        }
        if has_index:
            stored[".g_idx"] = index.to(torch.int32)
        return stored, on_grid(codes, scales, zeros, index)

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": ordered, "sym": symmetric,
        "damp_percent": 0.01, "true_sequential": True, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return Format(config, pack)


def awq(group: int) -> Format:
    def pack(name: str, weight: Tensor) -> Written:
        codes, scales, zeros, index = quantized(weight, 4, group, symmetric=False, dtype=torch.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble p of a word holds output order[p]

        def interleaved(rows: Tensor) -> Tensor:
            return words(rows.reshape(len(rows), -1, 8)[:, :, order].reshape(len(rows), -1), 4)

        stored = {
            ".qweight": interleaved(codes.t().contiguous()),
            ".qzeros": interleaved(zeros.t().contiguous()),
            ".scales": scales.t().contiguous(),
        }
        return stored, on_grid(codes, scales, zeros, index)

    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
    return Format({**config, "modules_to_not_convert": None, "backend": "autoawq"}, pack)


# compressed-tensors


def scheme(bits: int, strategy: str, *, targets: list[str] | None = None, is_float: bool = False, **more: Any) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
    }
    weights |= {"observer": "minmax", "observer_kwargs": {}, "group_size": None, "block_structure": None, "actorder": None}
    return {
        "targets": targets or ["Linear"],
        "weights": {**weights, **more},
        "input_activations": None,
        "output_activations": None,
    }


def compressed(layout: str, pack: Callable[[str, Tensor], Written], *groups: dict[str, Any], **more: Any) -> Format:
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)}, "kv_cache_scheme": None,
        "global_compression_ratio": 1.5, "version": "0.12.0", "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip
    return Format({**config, **more}, pack)


def packed_words(
    bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, packs_zeros: bool = True
) -> Callable[[str, Tensor], Written]:
    def pack(name: str, weight: Tensor) -> Written:
        index = act_order(name, weight.shape[1], group) if ordered else None
        codes, scales, zeros, index = quantized(weight, bits, group, symmetric=symmetric, dtype=torch.bfloat16, index=index)
        stored = {".weight_packed": words(codes, bits), ".weight_scale": scales, ".weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            packed = words(zeros.t(), bits).t().contiguous()
            stored[".weight_zero_point"] = packed if packs_zeros else (zeros - 2 ** (bits - 1)).to(torch.int8)
        if ordered:
            stored[".weight_g_idx"] = index.to(torch.int32)
        return stored, on_grid(codes, scales, zeros, index)

    return pack


def packed_int8(group: int = 0, *, symmetric: bool = True, bits: int = 8) -> Callable[[str, Tensor], Written]:
    def pack(name: str, weight: Tensor) -> Written:
        codes, scales, zeros, index = quantized(weight, bits, group, symmetric=symmetric, dtype=torch.bfloat16)
        middle = 2 ** (bits - 1)
        stored = {".weight": (codes - middle).to(torch.int8), ".weight_scale": scales}
        if not symmetric:
            stored[".weight_zero_point"] = (zeros - middle).to(torch.int8)
        return stored, on_grid(codes, scales, zeros, index)

    return pack


def packed_by_tensor(name: str, weight: Tensor) -> Written:
    scale = (weight.abs().max() / 127).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {".weight": values, ".weight_scale": scale.reshape(1)}, values.bfloat16() * scale


def packed_fp8(
    strategy: str, dtype: torch.dtype, ending: str = ".weight_scale", block: int = 32
) -> Callable[[str, Tensor], Written]:
    def pack(name: str, weight: Tensor) -> Written:
        rows, width = weight.shape
        height, size = {"tensor": (rows, width), "channel": (1, width), "block": (block, block)}[strategy]
        scales = torch.empty(-(-rows // height), -(-width // size), dtype=dtype)
        whole = torch.empty(rows, width)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = (slice(i * height, (i + 1) * height), slice(j * size, (j + 1) * size))
                scales[i, j] = (weight[part].abs().max() / 448).to(dtype)
                whole[part] = scales[i, j].float()
        values = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {".weight": values, ending: scales.reshape(()) if strategy == "tensor" else scales}
        result = dtype if dtype.itemsize > 1 else torch.float32
        return stored, values.to(result) * whole.to(result)

    return pack


def mixed(name: str, weight: Tensor) -> Written:
    return packed_int8()(name, weight) if "self_attn" in name else packed_words(4, 32)(name, weight)


# bitsandbytes


def bitsandbytes4(kind: str, *, nested: bool, block: int = 64) -> Format:
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def pack(name: str, weight: Tensor) -> Written:
        flat = weight.float().reshape(-1, block)
        absmax = flat.abs().amax(1)
        codes = (flat[:, :, None] / absmax[:, None, None] - table).abs().argmin(2).reshape(-1, 2).to(torch.uint8)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
        stored = {".weight": (codes[:, :1] << 4) | codes[:, 1:], ".weight.absmax": absmax, ".weight.quant_map": table}
        if nested:
            offset = absmax.mean()
            scales = (absmax - offset).abs().max().reshape(1)
            levels = torch.linspace(-1, 1, 256)
            absmax_codes = ((absmax - offset)[:, None] / scales - levels).abs().argmin(1).to(torch.uint8)
            absmax = levels[absmax_codes.long()] * scales + offset
            stored |= {".weight.absmax": absmax_codes, ".weight.nested_absmax": scales, ".weight.nested_quant_map": levels}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored[f".weight.quant_state.bitsandbytes__{kind}"] = content
        dense = table[codes.long()].reshape(-1, block) * absmax[:, None]
        return stored, dense.reshape(weight.shape).bfloat16()

    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True,
        "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None,
    }  # fmt: skip
    return Format(config, pack)


def bitsandbytes8() -> Format:
    def pack(name: str, weight: Tensor) -> Written:
        scb = weight.abs().amax(1).float()
        values = (weight * 127 / scb[:, None]).round().to(torch.int8)
        stored = {".weight": values, ".SCB": scb, ".weight_format": torch.zeros((), dtype=torch.uint8)}
        return stored, values * scb.view(-1, 1) * 7.874015718698502e-3

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}
    return Format(config, pack)


# MXFP4: [experts, in, out] in the plain folder


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return blocks and scales of [experts, in, out], and what they stand for."""
    blocks = weight.transpose(1, 2).reshape(weight.shape[0], weight.shape[2], -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(3))).to(torch.int64) - 2
    values = torch.tensor(E2M1 + [-number for number in E2M1])
    scaled = blocks / (2.0**exponents)[..., None]
    codes = (scaled[..., None] - values).abs().argmin(4)
    stored = {
        "_blocks": (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8),
        "_scales": (exponents + 127).to(torch.uint8),
    }
    dense = values[codes] * (2.0**exponents)[..., None]
    return stored, dense.flatten(2).transpose(1, 2).contiguous()


FORMATS: dict[str, Format] = {
    "gptq 4 bits g32": gptq(4, 32),
    "gptq 4 bits g32, no g_idx": gptq(4, 32, has_index=False),
    "gptq 4 bits g32, act-order": gptq(4, 32, ordered=True),
    "gptq 4 bits g32, asymmetric": gptq(4, 32, symmetric=False),
    "gptq 4 bits g32, asymmetric v2": gptq(4, 32, symmetric=False, version=2),
    "gptq 4 bits by output": gptq(4, 0),
    "gptq 2 bits g32": gptq(2, 32, symmetric=False),
    "gptq 3 bits g32": gptq(3, 32, symmetric=False, version=2),
    "gptq 8 bits g16": gptq(8, 16),
    "gptq 8 bits by output": gptq(8, 0),
    "gptq, quantize_config.json": Format(gptq(4, 32).config, gptq(4, 32).pack, side_file="quantize_config.json"),
    "awq g32": awq(32),
    "awq by output": awq(0),
    "compressed int8 by output": compressed("int-quantized", packed_int8(), scheme(8, "channel")),
    "compressed int8 g32": compressed("int-quantized", packed_int8(32), scheme(8, "group", group_size=32)),
    "compressed int8 by tensor": compressed("naive-quantized", packed_by_tensor, scheme(8, "tensor")),
    "compressed int4 in bytes": compressed("int-quantized", packed_int8(32, bits=4), scheme(4, "group", group_size=32)),
    "compressed int8, asymmetric": compressed(
        "int-quantized", packed_int8(symmetric=False), scheme(8, "channel", symmetric=False)
    ),
    "compressed w8a8": compressed(
        "int-quantized", packed_int8(), {**scheme(8, "channel"), "input_activations": {"num_bits": 8, "dynamic": True}}
    ),
    "compressed w4a16 g32": compressed("pack-quantized", packed_words(4, 32), scheme(4, "group", group_size=32)),
    "compressed w4a16, asymmetric": compressed(
        "pack-quantized", packed_words(4, 32, symmetric=False), scheme(4, "group", group_size=32, symmetric=False)
    ),
    "compressed w4a16, asymmetric, early": compressed(
        "pack-quantized",
        packed_words(4, 32, symmetric=False, packs_zeros=False),
        scheme(4, "group", group_size=32, symmetric=False),
    ),
    "compressed w4a16, act-order": compressed(
        "pack-quantized", packed_words(4, 32, ordered=True), scheme(4, "group", group_size=32, actorder="group")
    ),
    "compressed w8a16 packed": compressed("pack-quantized", packed_words(8, 0), scheme(8, "channel")),
    "compressed fp8 by tensor": compressed(
        "float-quantized", packed_fp8("tensor", torch.bfloat16), scheme(8, "tensor", is_float=True)
    ),
    "compressed fp8 by output": compressed(
        "float-quantized", packed_fp8("channel", torch.bfloat16), scheme(8, "channel", is_float=True)
    ),
    "compressed fp8 in blocks": compressed(
        "float-quantized", packed_fp8("block", torch.bfloat16), scheme(8, "block", is_float=True, block_structure=[32, 32])
    ),
    "compressed, two groups": compressed(
        "mixed-precision", mixed,
        {**scheme(8, "channel", targets=["re:.*self_attn.*"]), "format": "int-quantized"},
        {**scheme(4, "group", group_size=32), "format": "pack-quantized"},
    ),
    "fp8 in blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]},
        packed_fp8("block", torch.float32, ".weight_scale_inv"),
    ),
    "fp8 by tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        packed_fp8("tensor", torch.float32),
        extra=lambda name: {".input_scale": torch.tensor(1.0)},
    ),
    "fp8 by tensor, Mistral's names": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        packed_fp8("tensor", torch.bfloat16, ".weight_scale_inv"),
        extra=lambda name: {".activation_scale": torch.tensor(1.0)},
    ),
    "fp8 in blocks, e8m0": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
        packed_fp8("block", torch.float8_e8m0fnu, ".weight_scale_inv"),
    ),
    "fbgemm fp8": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, packed_fp8("channel", torch.float32)),
    "modelopt fp8": Format(
        {
            "producer": {"name": "modelopt", "version": "0.33"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
        },
        packed_fp8("tensor", torch.float32),
        side_file="hf_quant_config.json",
        extra=lambda name: {".input_scale": torch.tensor(1.0)},
    ),
    "bitsandbytes nf4": bitsandbytes4("nf4", nested=False),
    "bitsandbytes nf4, double": bitsandbytes4("nf4", nested=True),
    "bitsandbytes fp4": bitsandbytes4("fp4", nested=False),
    "bitsandbytes int8": bitsandbytes8(),
}  # fmt: skip
"""Every format with the settings that change how it is read."""


def write_quantized(plain: Path, folder: Path, form: Format, *, transposed: Iterable[str] = ()) -> tuple[Path, Path]:
    """Write the plain folder's maps in a format to `folder`/quantized, and what they stand for to `folder`/dense. `transposed`:
    endings of modules that the plain folder stores [in, out]."""
    stored, dense = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if not is_map(name, tensor) or re.search(form.skipped, stem):
            stored[name] = dense[name] = tensor
            continue
        is_turned = stem.endswith(tuple(transposed))
        parts, weight = form.pack(stem, tensor.t().contiguous() if is_turned else tensor)
        stored |= {stem + ending: part.clone().contiguous() for ending, part in {**parts, **form.extra(stem)}.items()}
        dense[name] = (weight.t() if is_turned else weight).float().contiguous()
    return _write(plain, folder / "quantized", stored, form), _write(plain, folder / "dense", dense, None)


def write_mxfp4(plain: Path, folder: Path) -> tuple[Path, Path]:
    """Write a plain GPT-OSS with experts in MXFP4, and with what these stand for."""
    stored, dense = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = dense[name] = tensor
            continue
        parts, dense[name] = mxfp4(tensor)
        stored |= {name + ending: part.contiguous() for ending, part in parts.items()}
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
    form = Format(config, lambda name, weight: ({}, weight))
    return _write(plain, folder / "quantized", stored, form), _write(plain, folder / "dense", dense, None)


def is_map(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and not re.search(r"embed|norm|router|gate\.weight|wte|wpe", name)


def _write(plain: Path, folder: Path, tensors: dict[str, Tensor], form: Format | None) -> Path:
    shutil.copytree(plain, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if form is not None and form.side_file:
        (folder / form.side_file).write_text(json.dumps(form.config))
    elif form is not None:
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return folder
