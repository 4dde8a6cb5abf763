"""The logits processor that vLLM loads: tokens are drawn by pdmesh's own rules, so that a request draws the same on every worker.

vLLM's runners draw by a running state, or by absolute position; both change when a request moves with its history as prompt. Here
the draw is a function of logits, seed, choice and index (pdmesh/engine/sampling/), with pdmesh's penalties, minimum length and
grammars, whatever part of the output is vLLM's prompt. The drawn token gets the highest logit, and vLLM's greedy pick takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from pdmesh_vllm.link import worker_link_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REQUEST = "pdmesh_request"
"""The key of `SamplingParams.extra_args` under which the request's id in vLLM stands."""


class Slots:
    """Follow which request is in which row of vLLM's batch."""

    def __init__(self) -> None:
        self._names: dict[int, str | None] = {}

    def update(self, change: BatchUpdate) -> None:
        """Apply a change: removed, added, then moved rows, as vLLM orders them."""
        for row in change.removed:
            self._names.pop(row, None)
        for row, params, _prompt, _output in change.added:
            self._names[row] = (params.extra_args or {}).get(REQUEST)
        for one, other, direction in change.moved:
            moved, replaced = self._names.pop(one, None), self._names.pop(other, None)
            if moved is not None:
                self._names[other] = moved
            if direction is MoveDirectionality.SWAP and replaced is not None:
                self._names[one] = replaced

    def names(self, num_rows: int) -> list[str | None]:
        """Return the requests of the first rows; None: a row of vLLM's own, such as a profiling run's."""
        return [self._names.get(row) for row in range(num_rows)]


class PdmeshDraw(LogitsProcessor):
    """Draw the tokens of a step."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        transfer = vllm_config.kv_transfer_config
        self._link = worker_link_of(transfer.kv_connector_extra_config if transfer is not None else {})
        self._slots = Slots()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self._slots.update(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        names = self._slots.names(logits.shape[0])
        if self._link.draws is None or not any(names):
            return logits
        tokens = torch.tensor(self._link.draws.draw(logits, names), device=logits.device)
        return logits.scatter_(1, tokens[:, None], float("inf"))
