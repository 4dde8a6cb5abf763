"""Least squares with coefficients that are not negative, for a handful of unknowns. Pure.

Fast NNLS on the normal equations (Bro and de Jong, 1997, after Lawson and Hanson): unknowns enter the passive set, in which the
equations hold exactly, while that lowers the error, and leave it where they would turn negative.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_TOLERANCE = 1e-12


def solve_non_negative(gram: Array, moments: Array) -> Array:
    """The x >= 0 that minimizes x·gram·x - 2·moments·x. `gram` [n, n] is positive definite, `moments` [n]; returns [n]."""
    x = np.zeros(len(moments))
    passive = np.zeros(len(moments), dtype=bool)
    tolerance = _TOLERANCE * max(1.0, float(np.abs(moments).max()))
    for _ in range(4 * len(moments)):  # rounding could make it turn in circles; any x on the way is a valid answer
        slope = np.where(passive, -np.inf, moments - gram @ x)
        entering = int(slope.argmax())
        if slope[entering] <= tolerance:
            break
        passive[entering] = True
        x = _settle(gram, moments, x, passive)
    return x


def _settle(gram: Array, moments: Array, x: Array, passive: NDArray[np.bool_]) -> Array:
    """The solution on the passive set, without those that have to leave it."""
    while True:
        target = np.zeros_like(x)
        target[passive] = np.linalg.solve(gram[np.ix_(passive, passive)], moments[passive])
        falling = passive & (target <= 0.0)
        if not falling.any():
            return target
        share = float(np.min(x[falling] / np.maximum(x[falling] - target[falling], 1e-300)))
        x = np.maximum(x + share * (target - x), 0.0)
        leaving = falling & (x <= _TOLERANCE)
        passive &= ~(leaving if leaving.any() else falling)
        x[~passive] = 0.0
