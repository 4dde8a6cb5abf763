"""How evenly a model's experts are used: tokens by expert within the last minute, and what is shown of them.

A model has hundreds of experts in dozens of layers, so no metric has a series for each: quantiles over all of them, and the
imbalance, a layer's busiest expert over its mean, which is how much longer than with even use that layer takes where experts are
split over devices.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW_S = 60.0
KEPT = 12  # looks of a window, however many there are
QUANTILES = (0.0, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class ExpertLoad:
    """Hold what is shown. `num_tokens`: since start, a token counted once for each expert that it took; the others are of the
    window, empty before its first token. `loads`: an expert's tokens over the mean of its layer, by quantile."""

    num_tokens: int
    loads: dict[float, float]
    imbalances: dict[str, float]  # over layers: mean, max
    idle_share: float = 0.0


class ExpertWindow:
    """Keep the counts of earlier looks, to subtract them from the present ones."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, Tensor]] = deque()

    def take(self, counts: Tensor, now_s: float) -> ExpertLoad:
        """Return the load. `counts` [layers, num_experts] int64, since start; it may go on counting."""
        counts = counts.clone()
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        recent = counts - self._seen[0][1] if self._seen else counts
        if not self._seen or now_s - self._seen[-1][0] >= self._window_s / KEPT:
            self._seen.append((now_s, counts))
        return _load(int(counts.sum()), recent)


def _load(num_tokens: int, recent: Tensor) -> ExpertLoad:
    used = recent[recent.sum(1) > 0].double()
    if not len(used):
        return ExpertLoad(num_tokens, {}, {})
    loads = used / used.mean(1, keepdim=True)
    most = loads.amax(1)
    quantiles = torch.quantile(loads.flatten(), torch.tensor(QUANTILES, dtype=loads.dtype)).tolist()
    return ExpertLoad(
        num_tokens,
        dict(zip(QUANTILES, quantiles, strict=True)),
        {"mean": float(most.mean()), "max": float(most.max())},
        float((used == 0).double().mean()),
    )
