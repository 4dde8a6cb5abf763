"""An engine that runs as without drafts, a proposer that is asked before its steps, and the oracle of what it must say."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation.cost_curve import CostCurve
from pdmesh.engine.speculation.draft import Draft
from pdmesh.engine.speculation.draft_models.kv import Room, room_in
from pdmesh.engine.speculation.draft_models.loading import Target
from pdmesh.engine.speculation.draft_models.proposer import ModelDraft
from pdmesh.engine.speculation.proposer import Ask, Proposer
from pdmesh.engine.speculation.speculator import Bounds, Speculator
from pdmesh.engine.weight_versions import ForwardModel
from pdmesh.sampling_params import SamplingParams
from tests.engine.paged_loop import Chunk, PagedLoop
from tests.support.mock_engine import Collector, open_engine

DEPTH = 4


def load_tiny(folder: Path, backend: str) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), backend=backend, dtype="float32", num_threads=1))


def request(name: str, prompt: Sequence_[int], *, emitted: tuple[tuple[int, ...], ...] = (), **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "seed": 7, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return EngineRequest(name, tuple(prompt), params, emitted)


def engine_of(loaded: LoadedModel, **settings: object) -> Engine:
    """Nobody guesses unless `settings` say so."""
    given = {"num_blocks": 128, "max_num_batched_tokens": 64, "speculation": "none", **settings}
    return open_engine(EngineConfig(model="tiny", num_threads=1, **given), loaded)  # type: ignore[arg-type]


def target_of(engine: Engine) -> Target:
    return Target(engine.config, engine.model_config, engine.kv.shape)


def room_of(engine: Engine) -> Room:
    return room_in(engine._allocator)


@dataclass
class Counted:
    """A model, and how many tokens each of its passes had."""

    model: ForwardModel
    passes: list[int] = field(default_factory=list)

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        self.passes.append(batch.num_tokens)
        return self.model.forward(batch, kv, signal)


def count_passes(proposer: ModelDraft) -> list[int]:
    """From now on, tokens of each forward pass of the proposer's model."""
    counted = Counted(proposer._model)
    proposer._model = counted
    return counted.passes


def decoding(engine: Engine) -> list[Sequence]:
    """Who is asked for: one choice each, with its last token to compute, and those that a grammar forced before it."""
    return [sequence for sequence in engine._scheduler.running if sequence.is_going_on and len(sequence.choices) == 1]


def propose(engine: Engine, proposer: ModelDraft, depth: int = DEPTH, least_chance: float = 0.0) -> dict[Sequence, Draft]:
    """Of all sequences that decode; `depth` is cut to what they have left, as an engine does."""
    asks = []
    for sequence in decoding(engine):
        left = sequence.group.request.sampling.max_tokens - len(sequence.output) - 1
        if left > 0:
            asks.append(Ask(sequence, min(depth, left), min(depth, left), least_chance))
    drafts = proposer.propose(asks)
    assert len(drafts) == len(asks)
    assert all(draft.is_chain for draft in drafts)
    engine.check_integrity()
    return {ask.sequence: draft for ask, draft in zip(asks, drafts, strict=True)}


def go_on(engine: Engine, collector: Collector, num_steps: int) -> bool:
    """Some steps; False when there was nothing to do."""
    for _ in range(num_steps):
        result = engine.step()
        if result is None:
            return False
        collector.take(result)
    return True


@dataclass
class Oracle:
    """What a model drafts, each token computed from all tokens before it, from the first on."""

    loaded: LoadedModel
    max_context: int = 2048

    def __post_init__(self) -> None:
        self._loop = PagedLoop(self.loaded, num_blocks=64)

    def logits(self, token_ids: Sequence_[int]) -> Tensor:
        """[1, vocab] behind these tokens."""
        table = self._loop.table(len(token_ids))
        logits = self._loop.step([Chunk(table, token_ids, 0)])
        self._loop.release(table)
        return logits

    def draft(self, sequence: Sequence, depth: int, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
        request = sequence.group.request
        model, output, matcher = self.loaded.model, list(sequence.output), sequence.matcher()
        sampler = model.sampler() if isinstance(model, NativeModel) else Sampler()
        matcher = matcher.copy() if matcher else None
        params = replace(request.sampling, logprobs=None)
        for _ in range(depth):
            allowed = matcher.allowed() if matcher else None
            row = SampleRow(params, sequence.choices[0], len(output), request.prompt, tuple(output), eos_token_ids, allowed)
            [drawn] = sampler.sample(self.logits([*request.prompt, *output]), [row])
            output.append(drawn.token_id)
            if matcher:
                matcher.take(drawn.token_id)
        return tuple(output[len(sequence.output) :])


def first_layers(loaded: LoadedModel, num_layers: int) -> LoadedModel:
    """What the first layers draft, as a model of its own."""
    model = loaded.model.first_layers(num_layers)
    return replace(loaded, config=model.config, model=model)


def speculate(engine: Engine, proposer: Proposer, length: int) -> Speculator:
    """From now on the engine verifies the first `length` guesses for each sequence in every step, whatever it costs."""
    bounds = Bounds(length, engine.config.max_num_batched_tokens, 2048, fixed_length=length)
    engine.speculator = Speculator([proposer], CostCurve((1, 8), (0.01, 0.01)), bounds)
    return engine.speculator
