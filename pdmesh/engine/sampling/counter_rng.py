"""Counter-based noise: a token's noise is a function of (seed, choice, index in the output, token id), never of process state.

So the same token is drawn wherever and in whatever order it is drawn (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3,
2011, for the idea; the mixing function is splitmix64's finalizer, Steele et al., 2014, applied twice).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SECOND = 0xD1B54A32D192ED03  # any constant without structure in common with the others
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel(seed: int, choice: int, index: int, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise [N] float32 for token_ids [N] int64, one value per token id.

    u: 32 high bits x of the mixed counter give v = (x + 0.5) * 2^-32 in (0, 1); E = -log1p(-v) is exponential, -log E is Gumbel.
    Values end at about 22.9 (32 bits). In float32 the few v that round to 1 give E = inf and noise -inf: never drawn.
    """
    bits = random_bits(seed, choice, index, token_ids)
    v = bits.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return torch.log1p(v.neg_()).neg_().log_().neg_()


def gumbel_array(seed: int, choice: int, index: int, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Compute `gumbel` in NumPy, up to its rounding: for estimates. Torch splits arrays of this size over threads, which take
    longer to wake up than to compute while those of the model's step wait for them."""
    first, second = _keys(seed, choice, index)
    x = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = _mix_array(_mix_array(x + np.uint64(first)) ^ np.uint64(second))
    v = ((x >> np.uint64(32)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):  # the few v that round to 1, as above
        noise: NDArray[np.float32] = -np.log(-np.log1p(-v))
    return noise


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def random_bits(seed: int, choice: int, index: int, token_ids: Tensor) -> Tensor:
    """Return [N] int64 in [0, 2^32) for token_ids [N] int64: the 32 high bits of the mixed counter."""
    first, second = _keys(seed, choice, index)
    x = (token_ids + 1) * _signed(_GOLDEN)
    x = _mix(x.add_(_signed(first)))
    x = _mix(x.bitwise_xor_(_signed(second)))
    return _shift_right(x, 32)


def _keys(seed: int, choice: int, index: int) -> tuple[int, int]:
    """Return two 64-bit keys, one for each round, from the three counters."""
    key = _mix_int(seed & _MASK)
    key = _mix_int((key + _GOLDEN * (choice + 1)) & _MASK)
    key = _mix_int((key + _GOLDEN * (index + 1)) & _MASK)
    # Not from key + a multiple of _GOLDEN: token ids take those values, and one of them would cancel the second round.
    return key, _mix_int(key ^ _SECOND)


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """Mix int64 in place: products wrap like unsigned ones."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(_MIX_1))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(_MIX_2))
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift logically: torch's shift keeps the sign, so the bits that it shifts in are masked off."""
    return torch.bitwise_right_shift(x, count).bitwise_and_(2 ** (64 - count) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
