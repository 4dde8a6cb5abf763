"""Whether the Triton kernels can serve here, said without importing triton."""

from __future__ import annotations

import importlib.util
import os

from engine.kernels.triton.room import HOPPER_BYTES
from engine.kernels.triton.tiles import MAX_HEAD_DIM, choose_tiles
from engine.model_config import ModelConfig

INTERPRET = "TRITON_INTERPRET"


def why_not(config: ModelConfig, item_size: int = 2, room: int = HOPPER_BYTES) -> str | None:
    """What of this model the kernels do not compute; None when they compute it all. `item_size`: bytes of an activation; `room`:
    shared memory that a program may have. Quantized products fit wherever attention does."""
    if config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is more than {MAX_HEAD_DIM}"
    try:
        choose_tiles(config.head_dim, item_size, room)
    except ValueError as error:
        return str(error)
    if any(window is not None and window < 1 for window in config.windows):
        return "a sliding window of no tokens"
    return None


def why_not_here(device: str) -> str:
    """What is missing on this machine, or empty. On a CPU the kernels run in Triton's interpreter alone, for tests."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interprets = os.environ.get(INTERPRET) == "1"
    if device == "cuda":
        return f"{INTERPRET}=1 is set, which is for machines without a GPU" if interprets else ""
    return "" if interprets else f"on device={device} it runs in Triton's interpreter alone, for tests: {INTERPRET}=1 is not set"
