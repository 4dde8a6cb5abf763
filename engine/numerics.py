"""Which backend computes a model, and in which numbers: decided once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.kernels.cpu.model import why_not
from engine.model_config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0}


@dataclass(frozen=True)
class Numerics:
    """`weights`: float32, bfloat16, float16, int8 or int4. `dtype`: of what is not quantized. `why_torch`: why the kernels that
    would be the default do not serve, for a warning; empty when they do, or when torch was asked for."""

    backend: str  # "native" or "torch"
    weights: str
    group: int  # int4: inputs that share a scale
    dtype: torch.dtype
    kv_dtype: torch.dtype
    why_torch: str = ""

    def num_bytes(self, model: ModelConfig, num_weights: int) -> int:
        """Memory of a model's weights. The native backend keeps embeddings beside the head that is made of them, and the head in
        8 bits at least."""
        width = 0.5 + 4 / self.group if self.weights == "int4" else _WIDTHS[self.weights]
        if self.backend == "torch":
            return int(num_weights * width)
        table = model.vocab_size * model.hidden_size
        others = num_weights - table * (1 if model.tie_word_embeddings else 2)
        return int(others * width + table * (self.dtype.itemsize + max(width, 1.0)))

    def name(self, kernels: str) -> str:
        """All that decides the bits of a logit beside the weights and the KV dtype, such as `int8-native1-avx512_bf16`:
        format of the weights (and what is not quantized, if not bfloat16), kernels."""
        weights = f"{self.weights}g{self.group}" if self.weights == "int4" else self.weights
        if self.weights in ("int8", "int4") and self.dtype != torch.bfloat16:
            weights += f"+{_name(self.dtype)}"
        return f"{weights}-{kernels}"


def choose_numerics(config: EngineConfig, model: ModelConfig, *, has_int4: bool, no_library: str) -> Numerics:
    """`has_int4`: the checkpoint itself holds 4-bit weights. `no_library`: why there are no native kernels here, or empty.

    Raises ValueError, naming the field, for settings that the backend cannot compute.
    """
    reason = _why_torch(config, model, no_library)
    if config.backend == "native" and reason:
        raise ValueError(f"backend: native cannot run this: {reason}; give backend=torch, or auto")
    dtype = _choose_dtype(config, model)
    if reason or config.backend == "torch":
        _check_torch(config, dtype, reason)
        return Numerics(
            "torch", _name(dtype), 0, dtype, dtype, "" if config.backend == "torch" or config.device != "cpu" else reason
        )
    weights = config.quantization
    if weights == "auto":
        weights = ("int4" if has_int4 else "int8") if config.dtype == "auto" else "none"
    if weights == "none":
        return Numerics("native", _name(dtype), 0, dtype, _choose_kv(config, dtype))
    group = config.quantization_group if weights == "int4" else 0
    held = torch.bfloat16 if config.dtype == "auto" else dtype
    if held == torch.float16:
        raise ValueError(f"dtype: float16 does not go with quantization={weights}; give bfloat16, float32 or auto")
    return Numerics("native", weights, group, held, _choose_kv(config, held))


def _why_torch(config: EngineConfig, model: ModelConfig, no_library: str) -> str:
    if config.device != "cpu":
        return f"it is for device=cpu, this is {config.device}"
    is_plain = config.quantization == "none" or (config.quantization == "auto" and config.dtype != "auto")
    if is_plain and _choose_dtype(config, model) == torch.float16:
        return "it has no float16"
    return no_library or why_not(model, config.block_size) or ""


def _check_torch(config: EngineConfig, dtype: torch.dtype, reason: str) -> None:
    because = f" ({reason})" if reason else ""
    if config.quantization not in ("auto", "none"):
        raise ValueError(f"quantization: {config.quantization} needs backend=native{because}; give none")
    if config.kv_dtype not in ("auto", _name(dtype)):
        raise ValueError(f"kv_dtype: {config.kv_dtype} needs backend=native{because}; give auto")


def _choose_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    name = (model.dtype or "float32") if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ValueError(f"dtype: the checkpoint's {name!r} is not supported; give one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _choose_kv(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    if config.kv_dtype == "auto":
        return dtype
    return torch.int8 if config.kv_dtype == "int8" else _DTYPES[config.kv_dtype]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
