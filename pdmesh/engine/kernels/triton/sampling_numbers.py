"""Numbers inside the sampling kernels: exponential, noise, an order on floats, the best of some. Triton functions, no launchers.

All are written so that compilers have no choice: launches that use them set `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdmesh.engine.kernels.triton.kernel_cache_keys import settle_keys


@triton.jit
def exp_of(x: tl.tensor) -> tl.tensor:
    """e^x for float32 x <= 0, -infinity included; within one unit in the last place (the split of the argument and the polynomial
    are those of Moshier, Cephes). The GPU's own is off by 1e-6 of the value where x is -20."""
    near = tl.maximum(x, -104.0)  # e^-104 is 0 in float32
    n = tl.floor(near * 1.4426950408889634 + 0.5)
    r = near - n * 0.693359375
    r = r - n * -2.12194440e-4
    y = ((((1.9875691500e-4 * r + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2) * r + 1.6666665459e-1) * r + 0.5
    y = y * (r * r) + r + 1.0
    exponent = n.to(tl.int32)
    half = exponent >> 1  # in two steps, because 2^exponent may be too small for a normal number
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    return y * first * second


@triton.jit
def order_of(x: tl.tensor) -> tl.tensor:
    """int64 in [0, 2^32) that is ordered as float32 x is; -0 and 0 alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def random_bits(seed: tl.tensor, choice: tl.tensor, index: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """engine/noise.py's random_bits: seed, choice, index scalars, token_ids int32 -> uint64 in [0, 2^32)."""
    key = mix(seed.to(tl.uint64))
    key = mix(key + (choice.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    key = mix(key + (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    second = mix(key ^ 0xD1B54A32D192ED03)
    x = (token_ids.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    return mix(mix(x + key) ^ second) >> 32


@triton.jit
def gumbel_of(bits: tl.tensor) -> tl.tensor:
    """engine/noise.py's gumbel of random bits, float32. Both logarithms are taken in float64 and rounded, so that they are right
    to half a unit; float32's on the GPU are useless near 1, where the largest noise comes from."""
    v = ((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10).to(tl.float64)
    rest = 1.0 - v
    # log1p(-v) = log(rest) * -v / (1 - rest): what the subtraction rounded away comes back (Kahan).
    lost = tl.where(rest == 1.0, 1.0, v / tl.where(rest == 1.0, 1.0, 1.0 - rest))
    exponential = tl.where(rest == 1.0, v, -tl.log(rest) * lost).to(tl.float32)
    return -tl.log(exponential.to(tl.float64)).to(tl.float32)


@triton.jit
def best_of(values: tl.tensor, ids: tl.tensor, is_candidate: tl.tensor) -> tl.tensor:
    """The highest value among candidates and its lowest id; 2^31 - 1 without candidates."""
    best = tl.max(tl.where(is_candidate, values, float("-inf")), axis=0)
    return best, tl.min(tl.where(is_candidate & (values == best), ids, 2147483647), axis=0)


@triton.jit
def scaled(adjusted: tl.tensor, ids: tl.tensor, highest: tl.tensor, temperature: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """Logits as the highest 0 and divided by the temperature; -infinity outside the vocabulary."""
    value = tl.load(adjusted + ids, mask=ids < VOCAB, other=float("-inf")) - highest
    return tl.div_rn(value, temperature)


@triton.jit
def highest_of(best_values: tl.tensor, row: tl.tensor, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    chunks = tl.arange(0, CHUNKS)
    return tl.max(tl.load(best_values + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf")), axis=0)


settle_keys(globals())
