"""`make bench-latency`: how well the latency model predicts steps of SmolLM2, prompts of 16 to 1,400 tokens beside decode rows.

    python -m benchmarks.latency [--seconds N] [--own-time] [--threads N]

Each step is predicted before it is learned, with the model as a report would carry it. On a machine that others use, `--own-time`
counts the time that the engine's one thread itself ran: what is left is the model's error, not the scheduler's.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.engine_runs import make_engine
from benchmarks.harness import PLAIN, Figure, parser_of, say, write
from pdmesh.engine.engine import Engine
from pdmesh.engine.outputs import StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.models.registry import DEFAULT_MODEL, ensure_model
from pdmesh.planning.latency_fit import LatencyFit
from pdmesh.planning.latency_model import LatencyModel, Work
from pdmesh.sampling_params import SamplingParams
from pdmesh.worker.engines.builtin import prior_for

CONCURRENCY = (2, 8, 16, 4, 12)  # one after the other, each for a fifth of the time
ARRIVALS = 0.2  # of a new prompt before a step, while there is room
WARM_UP = {True: 10, False: 40}  # steps with and without prompt tokens whose errors do not count


@dataclass
class Errors:
    """|predicted - observed| / observed by whether the step has prompt tokens."""

    learned: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    prior: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def note(self, model: LatencyModel, prior: LatencyModel, work: Work, seconds: float) -> None:
        kind = work.prefill_tokens > 0
        self.learned[kind].append(abs(model.step_s(work) - seconds) / seconds)
        self.prior[kind].append(abs(prior.step_s(work) - seconds) / seconds)

    def figures(self) -> Iterator[Figure]:
        for kind, name, goal in ((False, "decode steps", 0.05), (True, "steps with prompt tokens", 0.10)):
            errors = self.learned[kind][WARM_UP[kind] :]
            if errors:
                yield Figure(f"{name}: median error", statistics.median(errors), "of 1", "lower", goal)
                yield Figure(f"{name}: 90th percentile of the error", sorted(errors)[int(0.9 * len(errors))], "of 1", "lower")
                yield Figure(f"{name}: median error of the prior", statistics.median(self.prior[kind]), "of 1", "lower")
                yield Figure(f"{name}", len(errors), "steps", "higher")


class Load:
    """Keeps as many requests in the engine as the part of the run wants."""

    def __init__(self, engine: Engine, seed: int = 1) -> None:
        self._engine, self._random, self._num_added = engine, random.Random(seed), 0

    def top_up(self, wanted: int) -> None:
        stats = self._engine.stats()
        if stats.num_running + stats.num_waiting < wanted and self._random.random() < ARRIVALS:
            self._num_added += 1
            self._engine.add(self._request())

    def _request(self) -> EngineRequest:
        length, max_tokens = int(2 ** self._random.uniform(4, 10.5)), int(2 ** self._random.uniform(4, 8))
        prompt = tuple(self._random.randrange(1000, 20000) for _ in range(length))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return EngineRequest(request_id=f"r{self._num_added}", prompt=prompt, sampling=sampling)


def steps(engine: Engine, seconds: float, clock: Callable[[], float]) -> Iterator[tuple[StepResult, float]]:
    """Every step of the run, and what it took by `clock`."""
    load, began = Load(engine), time.monotonic()
    while (share := (time.monotonic() - began) / seconds) < 1:
        load.top_up(CONCURRENCY[int(share * len(CONCURRENCY))])
        started = clock()
        result = engine.step()
        if result is not None:
            yield result, clock() - started


def run(engine: Engine, seconds: float, clock: Callable[[], float]) -> Errors:
    """One run; says what the model was in the end."""
    errors, prior = Errors(), prior_for(engine)
    fit = LatencyFit(prior)
    for result, took_s in steps(engine, seconds, clock):
        work = Work(*result.work)
        errors.note(fit.model(time.monotonic()), prior, work, took_s)
        fit.observe(work, took_s)
    say(f"prior   {prior}\nlearned {fit.model(time.monotonic() + 1)}")
    return errors


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.latency", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: all cores")
    parser.add_argument("--own-time", action="store_true", help="count the engine thread's own time, with one thread")
    args = parser.parse_args(argv)
    threads = 1 if args.own_time else args.threads
    engine = make_engine(ensure_model(DEFAULT_MODEL, say), prefix_caching=False, num_threads=threads, **PLAIN)
    errors = run(engine, args.seconds, time.thread_time if args.own_time else time.perf_counter)
    clock = "the engine thread's own time, one thread" if args.own_time else "wall time"
    write("latency", list(errors.figures()), model=DEFAULT_MODEL, seconds=args.seconds, clock=clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
