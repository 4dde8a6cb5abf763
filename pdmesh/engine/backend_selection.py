"""Select the backend and the number formats of a model, once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu.model import why_not
from pdmesh.engine.kernels.triton.support import why_no_fp8_kv
from pdmesh.engine.kernels.triton.support import why_not as triton_why_not
from pdmesh.engine.kernels.triton.tiles import shared_bytes
from pdmesh.engine.models.config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0}


@dataclass(frozen=True)
class Numerics:
    """`weights`: float32, bfloat16, float16, int8, int4 or fp8. `dtype` is that of what is not quantized. `why_torch` says why
    the default kernels cannot be used, for a warning; empty when they can, or when torch was configured. `rounds_activations`:
    products of many rows multiply fp8 by fp8 (pdmesh/engine/kernels/triton/linear/linear.py)."""

    backend: str  # "native", "triton" or "torch"
    weights: str
    group: int  # int4: inputs that share a scale
    dtype: torch.dtype
    kv_dtype: torch.dtype
    why_torch: str = ""
    rounds_activations: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.weights in ("int8", "int4", "fp8")

    def num_bytes(self, model: ModelConfig, num_weights: int) -> int:
        """Return the memory of a model's weights. Kernels keep embeddings besides the output head that is made of them, and the
        head in 8 bits at least."""
        width = 0.5 + 4 / self.group if self.weights == "int4" else _WIDTHS[self.weights]
        if self.backend == "torch" or not (self.backend == "native" or self.is_quantized):
            return int(num_weights * width)
        table = model.vocab_size * model.hidden_size
        others = num_weights - table * (1 if model.tie_word_embeddings else 2)
        return int(others * width + table * (self.dtype.itemsize + max(width, 1.0)))

    def name(self, kernels: str) -> str:
        """Return all that decides the bits of a logit besides the weights and the KV dtype, such as `int8-native4-avx512_bf16`:
        format of the weights (and of what is not quantized, if not bfloat16), kernels."""
        weights = f"{self.weights}g{self.group}" if self.weights == "int4" else self.weights
        weights += "a8" if self.rounds_activations else ""
        if self.is_quantized and self.dtype != torch.bfloat16:
            weights += f"+{_name(self.dtype)}"
        return f"{weights}-{kernels}"


def choose_numerics(
    config: EngineConfig, model: ModelConfig, *, has_int4: bool, no_library: str, no_triton: str = "triton was not looked for"
) -> Numerics:
    """Return the backend and formats. `has_int4`: the checkpoint itself has 4-bit weights. `no_library`, `no_triton`: why there
    are no native or no Triton kernels here, or empty.

    Raises ValueError, naming the field, for settings that the backend cannot compute.
    """
    is_triton = wants_triton(config)
    reason = _why_not_triton(config, model, no_triton) if is_triton else _why_torch(config, model, no_library)
    if config.backend in ("native", "triton") and reason:
        raise ValueError(f"backend: {config.backend} cannot run this: {reason}; give backend=torch, or auto")
    dtype = _choose_dtype(config, model)
    if reason or config.backend == "torch":
        _check_torch(config, dtype, reason)
        return Numerics("torch", _name(dtype), 0, dtype, dtype, "" if config.backend == "torch" else reason)
    if is_triton:
        return _triton(config, dtype)
    _check_native(config)
    weights = config.quantization
    if weights == "auto":
        weights = ("int4" if has_int4 else "int8") if config.dtype == "auto" else "none"
    if weights == "none":
        return Numerics("native", _name(dtype), 0, dtype, _choose_kv(config, dtype, is_narrow=False))
    group = config.quantization_group if weights == "int4" else 0
    held = torch.bfloat16 if config.dtype == "auto" else dtype
    if held == torch.float16:
        raise ValueError(f"dtype: float16 does not go with quantization={weights}; give bfloat16, float32 or auto")
    is_narrow = config.dtype == "auto" and model.suits_int8_kv
    return Numerics("native", weights, group, held, _choose_kv(config, held, is_narrow=is_narrow))


def wants_triton(config: EngineConfig) -> bool:
    """Return whether a warning should say why the Triton kernels cannot be used."""
    return config.backend == "triton" or (config.backend == "auto" and config.device == "cuda")


def _why_not_triton(config: EngineConfig, model: ModelConfig, no_triton: str) -> str:
    if config.tensor_parallel > 1 and model.experts is not None:
        return f"tensor_parallel={config.tensor_parallel}, and its kernels compute experts with one rank alone"
    if config.tensor_parallel > 1 and model.latent is not None:
        return f"tensor_parallel={config.tensor_parallel}, and its kernels compute latent attention with one rank alone"
    room = shared_bytes(torch.device(config.device))
    return no_triton or triton_why_not(model, _choose_dtype(config, model).itemsize, room) or ""


def _why_torch(config: EngineConfig, model: ModelConfig, no_library: str) -> str:
    if config.tensor_parallel > 1:
        return f"tensor_parallel={config.tensor_parallel}, and it computes with one rank alone"
    if config.device != "cpu":
        return f"it is for device=cpu, this is {config.device}"
    is_plain = config.quantization == "none" or (config.quantization == "auto" and config.dtype != "auto")
    if is_plain and _choose_dtype(config, model) == torch.float16:
        return "it has no float16"
    return no_library or why_not(model, config.block_size) or ""


def _triton(config: EngineConfig, dtype: torch.dtype) -> Numerics:
    """Choose formats for the Triton kernels: weights are unquantized unless configured, and quantized
    weights go with every activation `dtype`."""
    if config.kv_dtype not in ("auto", "fp8", _name(dtype)):
        raise ValueError(
            f"kv_dtype: {config.kv_dtype} needs backend=native; the Triton kernels have {_name(dtype)} and fp8; give auto or fp8"
        )
    if config.kv_dtype == "fp8" and config.device == "cuda" and (reason := why_no_fp8_kv(torch.cuda.get_device_capability())):
        raise ValueError(f"kv_dtype: {reason}")
    is_plain = config.quantization in ("auto", "none")
    weights = _name(dtype) if is_plain else config.quantization
    group = config.quantization_group if weights == "int4" else 0
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
    return Numerics("triton", weights, group, dtype, kv_dtype, rounds_activations=config.fp8_activations)


def _check_native(config: EngineConfig) -> None:
    if config.quantization == "fp8":
        raise ValueError("quantization: fp8 needs backend=triton, which is for device=cuda; give int8, int4, none or auto")
    if config.kv_dtype == "fp8":
        raise ValueError("kv_dtype: fp8 needs backend=triton, which is for device=cuda; give int8, which is as small, or auto")


def _check_torch(config: EngineConfig, dtype: torch.dtype, reason: str) -> None:
    if config.quantization not in ("auto", "none"):
        kernels = "native" if config.device == "cpu" and config.quantization != "fp8" else "triton"
        raise ValueError(f"quantization: {config.quantization} needs {_kernels(config, kernels, reason)}; give none")
    if config.kv_dtype not in ("auto", _name(dtype)):
        kernels = "triton" if config.kv_dtype == "fp8" else "native"
        raise ValueError(f"kv_dtype: {config.kv_dtype} needs {_kernels(config, kernels, reason)}; give auto")


def _kernels(config: EngineConfig, backend: str, reason: str) -> str:
    """Name the kernels, with the reason why they cannot be used where it concerns them."""
    is_about = config.tensor_parallel > 1 or wants_triton(config) == (backend == "triton")
    return f"backend={backend} ({reason})" if reason and is_about else f"backend={backend}"


def _choose_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    name = (model.dtype or "float32") if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ValueError(f"dtype: the checkpoint's {name!r} is not supported; give one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _choose_kv(config: EngineConfig, dtype: torch.dtype, *, is_narrow: bool) -> torch.dtype:
    """Return the type of KV on the native kernels, beside activations of `dtype`.

    `is_narrow`: `auto` is int8. It is so beside quantized weights, which round far more (perplexity of bfloat16's with int8 KV
    alone: 1.0002, benchmarks/results/cpu.json), unless a dtype is asked for or the model's keys may not fit 8 bits
    (ModelConfig.suits_int8_kv)."""
    if config.kv_dtype == "auto":
        return torch.int8 if is_narrow else dtype
    return torch.int8 if config.kv_dtype == "int8" else _DTYPES[config.kv_dtype]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
