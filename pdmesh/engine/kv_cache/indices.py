"""Indices of a tensor that may lie on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def indices_for(tensor: Tensor, values: Sequence[int]) -> Tensor:
    """[N] int64 on the tensor's device. torch would copy a list there from memory that is not pinned, and wait for all that the
    device has to do before."""
    if tensor.device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(tensor.device, non_blocking=True)
