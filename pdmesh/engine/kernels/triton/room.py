"""Shared memory that a program may have: what limits tiles and pipelines on GPUs other than Hopper's."""

from __future__ import annotations

from functools import cache

import torch

HOPPER_BYTES = 232_448
"""Of an H100 or H200, 227 KiB; an A100 has 166,912 (163), an L40S, A10 or RTX 4090 101,376 (99)."""


@cache
def shared_bytes(device: torch.device) -> int:
    """The most that one program may ask for. Where there is no GPU (the interpreter, tests) as much as on Hopper."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
