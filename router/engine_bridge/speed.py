"""How fast an engine computes, measured from its streams: the routing policy compares it with workers that report their steps."""

import time
from collections.abc import Callable

from pdmesh.planning.latency_fit import LatencyFit
from pdmesh.planning.latency_model import Work, prefill_context
from pdmesh.v1 import worker_pb2
from router.engine_bridge.requests import EngineRequest
from router.routing.cost_model import NEUTRAL


class EngineSpeed:
    """Fit the latency model of one engine. The times include the way to the engine and its queue, which a router pays as well."""

    def __init__(self) -> None:
        self._fit = LatencyFit(NEUTRAL)
        self._leader: tuple[EngineRequest, int] | None = None  # the choice whose chunks count the engine's steps
        self._last_s = 0.0

    def first_token(self, request: EngineRequest, running: Callable[[], Work]) -> None:
        """Record the prefill of a request. `running()`: what decodes beside it."""
        num_tokens, num_cached = request.num_prompt_tokens, request.num_cached_tokens
        work = running()._replace(
            prefill_tokens=max(1, num_tokens - num_cached), prefill_context=prefill_context(num_cached, num_tokens)
        )
        self._fit.observe(work, (request.first_ns - request.sent_ns) / 1e9)
        self._leader = None  # the step that others were in was no mere decode step

    def step(self, request: EngineRequest, choice: int, running: Callable[[], Work]) -> None:
        """Record new tokens of a choice: of one of them, whose chunks stand for the steps. `running()`: what decodes now."""
        leader, now_s = (request, choice), time.monotonic()
        if self._leader == leader:
            self._fit.observe(running(), now_s - self._last_s)
        elif self._leader is not None and not self._leader[0].is_over and self._leader[1] in self._leader[0].next_index:
            return
        self._leader, self._last_s = leader, now_s

    def message(self) -> worker_pb2.LatencyModel | None:
        """Return the model for a load report; None before the first measurement."""
        model = self._fit.model(time.monotonic())
        if not model.num_steps:
            return None
        return worker_pb2.LatencyModel(
            fixed_s=model.fixed_s,
            per_prefill_token_s=model.per_prefill_token_s,
            per_prefill_context_s=model.per_prefill_context_s,
            per_sequence_s=model.per_sequence_s,
            per_context_token_s=model.per_context_token_s,
            num_steps=model.num_steps,
            prefill_error=model.prefill_error,
            decode_error=model.decode_error,
        )
