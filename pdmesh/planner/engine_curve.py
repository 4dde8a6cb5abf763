"""`python -m pdmesh.planner.engine_curve JSON`: runs an engine for a while and prints how long its steps take, as JSON.

A process of its own, since it loads torch. Steps of all kinds are wanted: prompts of all lengths come beside few and many
sequences that decode. The five numbers are those that fit them best (`docs/latency_model.md`); the error that is left is said on
standard error.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np

from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory import effective_max_context
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from pdmesh.models import ensure_model
from planning.latency_model import LatencyModel, Work
from planning.least_squares import solve_non_negative
from planning.work_cells import WorkCells
from simulator.worker_spec import PRICES
from text.block_hash import hash_block
from worker.latency import prior_for

WARM_UP_STEPS = 20
LEAST_STEPS = 100
CONCURRENCY = (1, 4, 16, 2, 32, 8, 64)
"""One after the other, each for its part of the time; no more than the engine takes."""
ARRIVALS = 0.2
"""Of a new prompt before a step, while there is room."""
LONGEST_PROMPT, LONGEST_OUTPUT = 2048, 256
_HELD = 1e-6
"""Weight of the prior, for what no step has shown."""

Step = tuple[Work, float]


def main() -> int:
    """1: it cannot be measured."""
    asked = json.loads(sys.argv[1])
    try:
        folder = ensure_model(asked["engine"].pop("model"))
        engine = Engine(EngineConfig(model=str(folder), prefix_caching=False, **asked["engine"]), hash_block=hash_block)
        say(f"measuring steps of {engine.numeric_mode} for {asked['seconds']:.0f} s")
        prior = prior_for(engine)
        steps = list(_steps(engine, asked["seconds"]))[WARM_UP_STEPS:]
    except Exception as error:  # noqa: BLE001  # whatever it is, the one who started this process is to read it in a line
        say(str(error))
        return 1
    if len(steps) < LEAST_STEPS:
        say(f"only {len(steps)} steps in {asked['seconds']:.0f} s, {LEAST_STEPS} are needed")
        return 1
    model = fitted(prior, steps)
    say(_errors(model, steps))
    print(json.dumps(_spec(engine, model)))
    return 0


def fitted(prior: LatencyModel, steps: list[Step]) -> LatencyModel:
    """The five numbers with the least relative error over all kinds of steps, however often each came."""
    cells = WorkCells()
    for work, seconds in steps:
        cells.add(work, seconds)
    work_of, seconds_of, weights = cells.observations()
    scale = np.maximum([getattr(prior, name) for name in PRICES], 1e-12)
    rows = work_of * scale / seconds_of[:, None]
    weighted = rows * weights[:, None]
    gram = weighted.T @ rows + _HELD * np.eye(len(scale))
    numbers = scale * solve_non_negative(gram, weighted.sum(axis=0) + _HELD)
    fixed, token, context, row, row_context = map(float, numbers)
    return LatencyModel(fixed, token, context, row, row_context, num_steps=len(steps))


def say(text: str) -> None:
    """To whoever waits."""
    print(f"pdmesh plan: {text}", file=sys.stderr, flush=True)


def _steps(engine: Engine, seconds: float) -> Iterator[Step]:
    """Of a load that grows and shrinks."""
    rng, number, began_s = random.Random(1), 0, time.monotonic()
    while (share := (time.monotonic() - began_s) / seconds) < 1:
        stats = engine.stats()
        wanted = min(CONCURRENCY[int(share * len(CONCURRENCY))], engine.config.max_num_seqs)
        if stats.num_running + stats.num_waiting < wanted and (stats.num_running == 0 or rng.random() < ARRIVALS):
            number += 1
            engine.add(_request(engine, rng, number))
        result = engine.step()
        if result is not None:
            yield Work(*result.work), (result.ended_ns - result.started_ns) / 1e9


def _request(engine: Engine, rng: random.Random, number: int) -> EngineRequest:
    """Lengths are spread evenly over their logarithm."""
    most = effective_max_context(engine.config, engine.model_config)
    length = int(min(LONGEST_PROMPT, most // 2) ** rng.uniform(0.35, 1))
    max_tokens = min(int(LONGEST_OUTPUT ** rng.uniform(0.5, 1)), most - length)
    prompt = tuple(rng.randrange(engine.model_config.vocab_size) for _ in range(length))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=f"plan{number}", prompt=prompt, sampling=sampling)


def _errors(model: LatencyModel, steps: list[Step]) -> str:
    """Medians, of both kinds of steps."""
    named = []
    for name, has_prompt in (("that only decode", False), ("with prompts", True)):
        errors = [abs(model.step_s(work) - s) / s for work, s in steps if (work.prefill_tokens > 0) == has_prompt]
        if errors:
            named.append(f"{len(errors)} steps {name} are off by {statistics.median(errors):.1%} (median)")
    return "; ".join(named)


def _spec(engine: Engine, model: LatencyModel) -> dict[str, float | int]:
    config, stats = engine.config, engine.stats()
    return {
        **{name: getattr(model, name) for name in PRICES},
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "num_blocks": stats.num_total_blocks,
        "block_size": config.block_size,
        "max_context": effective_max_context(config, engine.model_config),
        "kv_bytes_per_token": engine.cost.kv_bytes_per_token,
        "prefix_tokens": config.block_size * max(1, 512 // config.block_size),
    }


if __name__ == "__main__":
    raise SystemExit(main())
