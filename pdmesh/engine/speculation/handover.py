"""The draft state of a hand-off: the hidden state from which the prefill worker drew the first token, in bfloat16.

It affects drafts only. So a state that does not fit, from a faulty worker or one with another configuration, is ignored.
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
    """Continue from a draft state that another worker computed; a proposer may implement it."""

    def restore(self, sequence: Sequence, hidden: Tensor) -> None:
        """Take over the state `hidden` [hidden_size] float32, from which the sequence's last token was drawn."""


def packed(hidden: Tensor) -> bytes:
    """Return the bytes of [hidden_size] float32 for the hand-off."""
    return hidden.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()


def unpacked(state: bytes, hidden_size: int) -> Tensor | None:
    """Return [hidden_size] float32; None, with a warning, for other bytes."""
    if len(state) != 2 * hidden_size:
        logger.warning("a draft state of %d bytes is ignored: %d were expected", len(state), 2 * hidden_size)
        return None
    hidden = torch.from_numpy(np.frombuffer(state, dtype="<i2").astype(np.int16)).view(torch.bfloat16).float()
    if not bool(hidden.isfinite().all()):
        logger.warning("a draft state that holds no numbers is ignored")
        return None
    return hidden
