"""This worker's latency model: what the machine promises at start, then what every step teaches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.hardware import MachineLimits, measure_limits
from pdmesh.engine.outputs import StepResult
from pdmesh.engine.scheduler.pacing import Pacer, StepCost
from pdmesh.planning.latency_fit import LatencyFit
from pdmesh.planning.latency_model import LatencyModel, Work
from pdmesh.planning.prior import Hardware, ModelShape, prior_of
from pdmesh.planning.roofline import ALL_REDUCE_S
from pdmesh.v1 import worker_pb2

TELL_STEPS = 32
"""After so many steps the engine is told anew what they cost."""
_GLOO_SUM_S = 2e-4  # of a row over two processes; 0.3 to 0.5 ms were seen on two busy cores


def limits_for(engine: Engine) -> MachineLimits:
    """To be called on the engine thread, whose cores are the ones that count; measures for some 50 ms, once per process."""
    cost, config = engine.cost, engine.config
    return measure_limits(cost.backend, cost.numbers, config.device, config.num_threads, config.tensor_parallel)


def prior_for(engine: Engine) -> LatencyModel:
    """On the engine thread."""
    cost, measured = engine.cost, limits_for(engine)
    return prior_of(
        Hardware(measured.operations_per_s, measured.bytes_per_s, _sum_s(engine.config)),
        ModelShape(
            num_layers=cost.num_layers,
            num_weights=cost.num_weights,
            num_head_weights=cost.num_head_weights,
            weight_bytes=cost.weight_bytes,
            kv_bytes_per_token=cost.kv_bytes_per_token,
            attention_operations=cost.attention_operations,
        ),
    )


def _sum_s(config: EngineConfig) -> float:
    if config.tensor_parallel == 1:
        return 0.0
    return ALL_REDUCE_S if config.device == "cuda" else _GLOO_SUM_S


class StepWatch:
    """Learns from steps. Steps and questions both come on the event loop; the engine thread waits for neither."""

    def __init__(self, pacer: Pacer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`pacer` is told what steps cost, so that the engine can size them. `clock`: seconds."""
        self._pacer = pacer
        self._clock = clock
        self._fit: LatencyFit | None = None
        self._num_seen = 0

    def start_from(self, prior: LatencyModel) -> None:
        """What there is to say before the first step."""
        self._fit = LatencyFit(prior)
        self._tell()

    def on_step(self, result: StepResult) -> None:
        """Learns from a step. Time between steps, idle or not, is none of a step's."""
        if self._fit is not None:
            self._fit.observe(Work(*result.work), (result.ended_ns - result.started_ns) / 1e9)
            self._num_seen += 1
            if self._num_seen % TELL_STEPS == 0:
                self._tell()

    @property
    def model(self) -> LatencyModel | None:
        """None before `start_from`."""
        return None if self._fit is None else self._fit.model(self._clock())

    def _tell(self) -> None:
        model = self.model
        if self._pacer is None or model is None:
            return
        cost = StepCost(
            model.fixed_s,
            model.per_prefill_token_s,
            model.per_prefill_context_s,
            model.per_sequence_s,
            model.per_context_token_s,
        )
        if all(map(math.isfinite, cost)):
            self._pacer.cost = cost


def latency_message(model: LatencyModel) -> worker_pb2.LatencyModel:
    """As it travels."""
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
