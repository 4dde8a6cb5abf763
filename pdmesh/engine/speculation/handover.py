"""What a prefill worker gives along for whoever guesses on: the hidden state that the first token was drawn from, in bfloat16.

It decides nothing but guesses. So a state that does not fit, of a worker with another configuration or a broken one, is ignored.
"""

from __future__ import annotations

import logging
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)


@runtime_checkable
class TakesOver(Protocol):
    """A proposer that can go on from a state that was computed elsewhere."""

    def restore(self, sequence: Sequence, hidden: Tensor) -> None:
        """The last token of the sequence was drawn from `hidden` [hidden_size] float32."""


def packed(hidden: Tensor) -> bytes:
    """[hidden_size] float32 as it travels."""
    return hidden.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()


def unpacked(state: bytes, hidden_size: int) -> Tensor | None:
    """[hidden_size] float32; None, with a warning, if it is none."""
    if len(state) != 2 * hidden_size:
        logger.warning("a draft state of %d bytes is ignored: %d were expected", len(state), 2 * hidden_size)
        return None
    hidden = torch.from_numpy(np.frombuffer(state, dtype="<i2").astype(np.int16)).view(torch.bfloat16).float()
    if not bool(hidden.isfinite().all()):
        logger.warning("a draft state that holds no numbers is ignored")
        return None
    return hidden
