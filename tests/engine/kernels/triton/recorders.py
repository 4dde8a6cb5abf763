"""A recorder that counts: graphs where there is a GPU, repeats of the launches elsewhere."""

from __future__ import annotations

import torch

from pdmesh.engine.kernels.triton.cuda_graphs import Recording, Work, make_recorder
from tests.engine.kernels.triton.paged import DEVICE


class Counted:
    """Counts what a recorder is asked for."""

    def __init__(self) -> None:
        self._inner = make_recorder(torch.device(DEVICE))
        self.num_recorded = self.num_replayed = 0

    def record(self, work: Work) -> Recording:
        self.num_recorded += 1
        recording = self._inner.record(work)

        def replay() -> None:
            self.num_replayed += 1
            recording.replay()

        return Recording(recording.output, replay)
