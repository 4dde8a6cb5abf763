"""Put on PYTHONPATH (`traced.py`): failpoints within the engine, which knows none. `engine.step` before each step is planned,
`engine.compute` while it is computed."""

from __future__ import annotations

from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.outputs import StepResult
from pdmesh.engine.runner.model_runner import ModelRunner, SampledOutput
from pdmesh.engine.scheduler.scheduler import SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.runtime import failpoints

_step, _run = Engine.step, ModelRunner.run


def step(self: Engine) -> StepResult | None:
    if self.has_work:
        failpoints.hit("engine.step")
    return _step(self)


def run(
    self: ModelRunner, plan: SchedulerOutput, signal: LayerReadiness | None = None, *, keep_hidden: bool = True
) -> dict[Sequence, list[SampledOutput]]:
    if any(piece.num_tokens > 1 for piece in plan.pieces):
        failpoints.hit("engine.compute")
    return _run(self, plan, signal, keep_hidden=keep_hidden)


Engine.step = step  # type: ignore[method-assign]
ModelRunner.run = run  # type: ignore[method-assign]
