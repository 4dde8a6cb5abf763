"""The decoder's layers without attention: norms, linear maps, MLPs, rotary embedding. Pure functions of rows; no state.

Row invariance: a token's numbers must not depend on how many other tokens share its step. Measurements (torch 2.13, AVX-512,
1 to 8 threads) and their consequences here:
- oneDNN with weights packed once gives each row the same bits for every M >= 2 rows (float32, bfloat16); M = 1 differs.
- MKL (torch's float32 `linear`) gives the same bits for M >= 4, with several threads only when M is also a multiple of 4 or
  M >= 12. So rows are padded to a multiple of 4 (`pad_rows`), everywhere.
- exp, rsqrt, sums and means over a row are the same for every number of rows. `F.silu` is not: its last few elements take a
  scalar path that rounds differently. So silu is written with `exp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.models.config import TemperatureConfig
from pdmesh.engine.models.rope import RopeConfig

ROW_MULTIPLE = 4


def temperatures(config: TemperatureConfig, max_context: int) -> Tensor:
    """Return the factor of a query at each position, [max_context] float32."""
    positions = torch.arange(max_context, dtype=torch.float32)
    return 1.0 + config.scale * torch.log1p(torch.floor((positions + config.offset) / config.period))


def pad_rows(x: Tensor) -> Tensor:
    """Pad [M, ...] -> [M', ...] with zero rows, M' the next multiple of 4 (see above)."""
    missing = -x.shape[0] % ROW_MULTIPLE
    return x if missing == 0 else torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [..., N] in any dtype -> same shape and dtype; in float32 in transformers' order (Zhang and Sennrich, 2019)."""
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


@dataclass(frozen=True)
class Norm:
    """Normalize the last dimension with a weight for each element, or for each head and element."""

    weight: Tensor
    eps: float
    kind: str = "rms"
    bias: Tensor | None = None
    wide: bool = False  # the weight multiplies in float32, before the result is rounded to x's dtype

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "rms" and not self.wide:
            return rms_norm(x, self.weight, self.eps)
        wide = x.float()
        if self.kind == "layer":
            normed = F.layer_norm(wide, wide.shape[-1:], None, None, self.eps) * self.weight.float()
            return (normed if self.bias is None else normed + self.bias.float()).to(x.dtype)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return (self.weight.float() * (wide * torch.rsqrt(variance + self.eps))).to(x.dtype)


@dataclass(frozen=True)
class QKNorm:
    """Normalize queries and keys. `weight` [num_heads + num_kv_heads, head_dim]: each head by itself, or (`num_heads` > 0) all
    query heads together, and all key heads."""

    norm: Norm
    num_heads: int = 0
    over_ranks: Callable[[Tensor], Tensor] | None = None  # sums over the ranks that share the heads, `num_ranks` of them
    num_ranks: int = 1

    @property
    def weight(self) -> Tensor:
        return self.norm.weight

    def summed(self, over_ranks: Callable[[Tensor], Tensor], num_ranks: int) -> QKNorm:
        """Return it as one rank's part of a norm over the heads of all ranks."""
        return replace(self, over_ranks=over_ranks, num_ranks=num_ranks) if self.num_heads else self

    def __call__(self, heads: Tensor) -> Tensor:
        """Take and return [T, num_heads + num_kv_heads, head_dim]."""
        if not self.num_heads:
            return self.norm(heads)
        parts = (heads[:, : self.num_heads], heads[:, self.num_heads :])
        if self.over_ranks is not None:
            return self._over_ranks(parts, self.over_ranks)
        weights = (self.weight[: self.num_heads], self.weight[self.num_heads :])
        norms = (Norm(weight.flatten(), self.norm.eps, self.norm.kind, None, self.norm.wide) for weight in weights)
        return torch.cat([norm(part.flatten(1)).view(part.shape) for norm, part in zip(norms, parts, strict=True)], dim=1)

    def _over_ranks(self, parts: Sequence[Tensor], over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        """Divide queries and keys by their root mean squares over all ranks, whose sums are exchanged once, [T, 2]."""
        wide = [part.float() for part in parts]
        squares = over_ranks(torch.stack([part.pow(2).sum((1, 2)) for part in wide], dim=1))
        counts = torch.tensor([part[0].numel() * self.num_ranks for part in wide], device=squares.device)
        factors = torch.rsqrt(squares / counts + self.norm.eps)[:, :, None, None].unbind(1)
        normed = torch.cat([part * factor for part, factor in zip(wide, factors, strict=True)], dim=1)
        dtype = parts[0].dtype
        return (self.weight.float() * normed).to(dtype) if self.norm.wide else self.weight * normed.to(dtype)


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), computed in float32, bits independent of the number of rows."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return x times the normal distribution's share below it (Hendrycks and Gimpel, 2016)."""
    wide = x.float()
    return (0.5 * wide * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return gelu's approximation by tanh."""
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


def relu2(x: Tensor) -> Tensor:
    """Return the square of relu (So et al., Primer, 2021)."""
    return torch.relu(x).square()


@dataclass(frozen=True)
class Xielu:
    """Compute a parabola above 0 and an exponential below, both with a slope of `beta` at 0 (Huang and Schlag, xIELU, 2024).
    `above` and `below` as a layer has learned them: their softplus counts."""

    above: Tensor
    below: Tensor
    beta: Tensor
    eps: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        above, below = F.softplus(self.above), self.beta + F.softplus(self.below)
        falling = (torch.expm1(torch.minimum(x, self.eps)) - x) * below
        return torch.where(x > 0, above * x * x, falling) + self.beta * x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": torch.relu,
    "relu2": relu2,
}


class Linear(Protocol):
    """A linear map: [M, in] -> [M, out] of the same dtype. On a CPU M is a multiple of 4."""

    kind: str  # names the kernel: part of the numeric mode

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """torch's own product: float16 on CPU, bfloat16 where the processor is too old for oneDNN, and everything on CUDA."""

    kind = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN's product, with the weights laid out for its kernels once, at load: for few rows several times faster than MKL,
    which packs them in every call. The packed weights replace the loaded ones, so the checkpoint's mapping can be closed."""

    kind = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROW_MULTIPLE)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest map of weight [out, in], bias [out] for their device and dtype."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type == "cpu" and has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _packs(weight.dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def _packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can pack: bfloat16 needs a processor with AVX-512 or AVX-NE-CONVERT."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class MLP(Protocol):
    """A layer's other half: [M, hidden_size] -> the same shape. M is a multiple of 4."""

    def __call__(self, x: Tensor) -> Tensor: ...


class GatedMLP:
    """Compute down(act(gate(x)) * up(x)) (Shazeer, GLU Variants, 2020); gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str = "silu") -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self._activate = ACTIVATIONS[activation]

    def with_down(self, down: Linear) -> GatedMLP:
        """Return it with another last map."""
        return GatedMLP(self.gate_up, down, self.activation)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self._activate(gate) * up)


class PlainMLP:
    """Compute down(act(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: str, learned: Xielu | None = None) -> None:
        """`learned`: the activation of a layer that has one of its own."""
        self.up, self.down, self.activation, self._learned = up, down, activation, learned
        self._activate = learned or ACTIVATIONS[activation]

    def with_down(self, down: Linear) -> PlainMLP:
        """Return it with another last map."""
        return PlainMLP(self.up, down, self.activation, self._learned)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._activate(self.up(x)))


# Rotary position embedding (Su et al., RoFormer, 2021) with the context-extending scalings of the Llama family.
#
# Sources: linear (Chen et al., Position Interpolation, 2023), dynamic NTK (bloc97 and emozilla, 2023), yarn (Peng et al., 2023,
# section 3), llama3 (Llama 3.1 reference code). Each follows transformers' `modeling_rope_utils` operation by operation, in
# float32, so that angles have the same bits.


class RotaryTable:
    """Hold cosines and sines of every position, computed once: a token's rotation depends on its position alone.

    LongRoPE has two sets of frequencies, and cached keys cannot change from one to the other: tables that reach beyond the
    original context have the long ones at every position, others the short ones.

    Dynamic NTK: transformers recomputes the frequencies from the longest position of each forward call and leaves cached keys
    as they were. Here a token at position p beyond max_position_embeddings uses the frequencies of length p + 1, which is what
    generation does token by token; only a prompt that is itself longer than max_position_embeddings differs.
    """

    def __init__(self, config: RopeConfig, max_context: int, *, dtype: torch.dtype, device: str = "cpu") -> None:
        inv_freq, scaling = inverse_frequencies(config, max_context)
        positions = torch.arange(max_context, dtype=torch.float32)
        angles = positions[:, None] * inv_freq
        if config.rope_type == "dynamic" and max_context > config.max_context:
            beyond = [p * _dynamic_frequencies(config, p + 1) for p in range(config.max_context, max_context)]
            angles[config.max_context :] = torch.stack(beyond)
        # The two halves of a rotated head use the same angle; the sine of the first half carries the minus of rotate_half.
        sin = angles.sin() * scaling
        self.cos = torch.cat([angles.cos() * scaling] * 2, dim=-1).to(device, dtype)
        self.sin = torch.cat([-sin, sin], dim=-1).to(device, dtype)

    @property
    def num_positions(self) -> int:
        return self.cos.shape[0]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, signed sin) of positions [T] int64, each [T, 1, rotary_dim]: computed once per step for all layers."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate a copy of x [T, H, head_dim]. cos, sin from `RotaryTable.at`; head dimensions beyond rotary_dim pass unchanged."""
    dim = cos.shape[-1]
    rotated = x[..., :dim]
    # rotate_half(x) * sin == swapped halves * signed sin: negation is exact, so the bits are those of transformers.
    swapped = torch.cat((rotated[..., dim // 2 :], rotated[..., : dim // 2]), dim=-1)
    result = rotated * cos + swapped * sin
    return result if dim == x.shape[-1] else torch.cat((result, x[..., dim:]), dim=-1)


def inverse_frequencies(config: RopeConfig, max_context: int = 0) -> tuple[Tensor, float]:
    """Return (inverse frequencies [rotary_dim / 2] float32, factor on cosines and sines) within the model's own context, for
    positions up to `max_context`."""
    base = _base_frequencies(config.theta, config.rotary_dim)
    match config.rope_type:
        case "default" | "dynamic":
            return base, 1.0
        case "linear":
            return base / config.factor, 1.0
        case "llama3":
            return _llama3_frequencies(config, base), 1.0
        case "longrope":
            is_long = config.is_long(max_context)
            factors = config.long_factor if is_long else config.short_factor
            return _longrope_frequencies(config, factors), longrope_scaling(config, is_long=is_long)
        case "yarn":
            return _yarn_frequencies(config), _yarn_attention_factor(config)
    raise ValueError(f"rope_type {config.rope_type!r} has no computation")


def _base_frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _dynamic_frequencies(config: RopeConfig, length: int) -> Tensor:
    dim, factor = config.rotary_dim, config.factor
    stretch = (factor * length / config.max_context) - (factor - 1)
    return _base_frequencies(config.theta * stretch ** (dim / (dim - 2)), dim)


def _longrope_frequencies(config: RopeConfig, factors: tuple[float, ...]) -> Tensor:
    """Divide each frequency by its own factor (Ding et al., LongRoPE, 2024)."""
    dim = config.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * config.theta**exponents)


def longrope_scaling(config: RopeConfig, *, is_long: bool) -> float:
    """Return the factor on cosines and sines within (short) or beyond the original context."""
    own = config.long_mscale if is_long else config.short_mscale
    if own is not None:
        return own
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_context))


def _llama3_frequencies(config: RopeConfig, base: Tensor) -> Tensor:
    """Divide long wavelengths by `factor`, keep short ones, and interpolate those between."""
    context, low, high = config.original_max_context, config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / base
    is_long, is_short = wavelength > context / low, wavelength < context / high
    scaled = torch.where(is_long, base / config.factor, base)
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / config.factor + smooth * scaled
    return torch.where(~is_short & ~is_long, between, scaled)


def _yarn_frequencies(config: RopeConfig) -> Tensor:
    """Extrapolate high frequencies, interpolate low ones, with a linear ramp between (paper, section 3.2)."""
    dim = config.rotary_dim
    pos_freqs = config.theta ** (torch.arange(0, dim, 2).float() / dim)
    extrapolation, interpolation = 1.0 / pos_freqs, 1.0 / (config.factor * pos_freqs)
    low, high = _yarn_correction_range(config)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return interpolation * (1 - keep) + extrapolation * keep


def _yarn_correction_range(config: RopeConfig) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        turns = config.original_max_context / (rotations * 2 * math.pi)
        return (config.rotary_dim * math.log(turns)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
