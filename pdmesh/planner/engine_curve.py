"""Runs an engine for a while and prints the fitted times of its steps as JSON: `python -m pdmesh.planner.engine_curve JSON`.

It runs as a separate process, since it loads torch. Steps of all kinds are needed: prompts of all lengths come beside few and
many decoding sequences. The five numbers are the best fit (`docs/latency_model.md`); the remaining error goes to standard error.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.memory import effective_max_context
from pdmesh.engine.request import EngineRequest
from pdmesh.models.registry import ensure_model
from pdmesh.planning.latency_fit import WorkCells, solve_non_negative
from pdmesh.planning.latency_model import LatencyModel, Work
from pdmesh.sampling_params import SamplingParams
from pdmesh.simulator.workers.spec import PRICES
from pdmesh.text.block_hash import hash_block
from pdmesh.worker.engines.builtin import prior_for

WARM_UP_STEPS = 20
LEAST_STEPS = 100
PHASES = ((1, 64), (1, 1024), (2, 256), (4, 64), (4, 1024), (8, 128), (16, 64), (16, 512), (32, 64), (64, 64))
"""Concurrent sequences, and the most tokens of their prompts; each for its part of the time."""
PROMPT_SHARE = 0.4
"""Share of a phase for the prompts of its sequences: on a slow machine they are shorter, so that decoding is seen too."""
OUTPUT_TOKENS = (24, 96)
_HELD = 1e-6
"""Weight of the prior, for what no step has shown."""
_CLIP = 1.5
"""Bound of a step's time over the first fit: more comes from something else on the machine."""

Step = tuple[Work, float]


def main() -> int:
    """Run; return 1 if it cannot be measured."""
    asked = json.loads(sys.argv[1])
    try:
        given, folder = tuple(asked["engine"].pop("override", ())), ensure_model(asked["engine"].pop("model"))
        config = EngineConfig(model=str(folder), prefix_caching=False, speculation="none", override=given, **asked["engine"])
        engine = Engine(config, hash_block=hash_block)
        say(f"measuring steps of {engine.numeric_mode} for {asked['seconds']:.0f} s")
        prior = prior_for(engine)
        steps = list(_steps(engine, asked["seconds"], prior.per_prefill_token_s))[WARM_UP_STEPS:]
    except Exception as error:  # noqa: BLE001  # the parent process reads any error as one line
        say(str(error))
        return 1
    if len(steps) < LEAST_STEPS:
        say(f"only {len(steps)} steps in {asked['seconds']:.0f} s, {LEAST_STEPS} are needed")
        return 1
    model = fitted(prior, steps)
    say(_errors(model, steps))
    print(json.dumps(_spec(engine, model)))
    return 0


def fitted(prior: LatencyModel, steps: Sequence[Step]) -> LatencyModel:
    """Return the five numbers with the least relative error over all kinds of steps, however often each came. It fits twice: the
    second time disturbed steps count for less."""
    first = _solved(prior, steps)
    return _solved(prior, [(work, min(seconds, _CLIP * first.step_s(work))) for work, seconds in steps])


def _solved(prior: LatencyModel, steps: Sequence[Step]) -> LatencyModel:
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
    """Print progress to standard error."""
    print(f"pdmesh plan: {text}", file=sys.stderr, flush=True)


def _steps(engine: Engine, seconds: float, token_s: float) -> Iterator[Step]:
    """Yield steps of one phase after the other. `token_s`: approximate time of a prompt's token."""
    rng, phase_s = random.Random(1), seconds / len(PHASES)
    for phase, (wanted, longest) in enumerate(PHASES):
        num_seqs = min(wanted, engine.config.max_num_seqs)
        length = max(8, min(longest, int(PROMPT_SHARE * phase_s / num_seqs / token_s)))
        yield from _phase(engine, rng, f"plan{phase}-", num_seqs, length, time.monotonic() + phase_s)


def _phase(engine: Engine, rng: random.Random, name: str, num_seqs: int, length: int, until_s: float) -> Iterator[Step]:
    """Run `num_seqs` sequences at once; each that ends is replaced. At the end all are removed."""
    number = 0
    while time.monotonic() < until_s:
        stats = engine.stats()
        if stats.num_running + stats.num_waiting < num_seqs:
            engine.add(_request(engine, rng, f"{name}{number}", length))
            number += 1
        result = engine.step()
        if result is not None:
            yield Work(*result.work), (result.ended_ns - result.started_ns) / 1e9
    for each in range(number):
        engine.release(f"{name}{each}")


def _request(engine: Engine, rng: random.Random, name: str, length: int) -> EngineRequest:
    """Return a request of half the length to the whole."""
    most = effective_max_context(engine.config, engine.model_config)
    length = min(rng.randint((length + 1) // 2, length), most // 2)
    max_tokens = min(rng.randint(*OUTPUT_TOKENS), most - length)
    prompt = tuple(rng.randrange(engine.model_config.vocab_size) for _ in range(length))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt=prompt, sampling=sampling)


def _errors(model: LatencyModel, steps: list[Step]) -> str:
    """Return the median errors, of both kinds of steps."""
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
