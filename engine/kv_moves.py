from __future__ import annotations

from torch import Tensor


def move_slots(kv: Tensor, sources: list[int], targets: list[int]) -> None:
    flat = kv.flatten(2, 3)
    flat[:, :, targets] = flat[:, :, sources].clone()
