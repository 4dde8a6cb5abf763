"""Decoding at a steady pace through a real engine: scheduling, sampling and Python included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from benchmarks.engine_runs import GREEDY
from benchmarks.gpu.context import synchronize
from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest

_NUMBERS = count()
WARM_STEPS = 5


@dataclass(frozen=True)
class Pace:
    """Of `num_steps` steps in which `batch` sequences got a token each."""

    seconds: float
    num_steps: int
    num_tokens: int
    mean_context: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.num_steps

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def prompt_of(engine: Engine, number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 7919 + i * 104_729) % engine.model_config.vocab_size for i in range(length))


def started(engine: Engine, batch: int, prompt: int, output: int) -> list[str]:
    """Requests that have all got their first token."""
    names = [f"steady-{next(_NUMBERS)}" for _ in range(batch)]
    for number, name in enumerate(names):
        params = GREEDY.params(output, ignore_eos=True)
        if not engine.add(EngineRequest(name, prompt_of(engine, number, prompt), params)):
            raise RuntimeError(f"the engine takes no more than {number} requests: raise max_num_seqs")
    waiting = set(names)
    while waiting:
        result = engine.step()
        waiting -= {update.request_id for update in result.updates} if result else set()
    return names


def steady_pace(engine: Engine, device: str, *, batch: int, prompt: int, steps: int) -> Pace:
    """Once everybody decodes; the requests are given up afterwards."""
    names = started(engine, batch, prompt, steps + 10 * WARM_STEPS)
    _take(engine, WARM_STEPS)
    synchronize(device)
    before = engine.stats().decode_context
    begin = time.perf_counter()
    num_tokens = _take(engine, steps)
    seconds = time.perf_counter() - begin
    after = engine.stats().decode_context
    for name in names:
        engine.release(name)
    while engine.step() is not None:
        """What was launched ahead comes to its end."""
    return Pace(seconds, steps, num_tokens, (before + after) / 2 / batch)


def _take(engine: Engine, steps: int) -> int:
    """Tokens of so many steps."""
    return sum(_tokens_of(engine) for _ in range(steps))


def _tokens_of(engine: Engine) -> int:
    result = engine.step()
    return sum(len(update.token_ids) for update in result.updates) if result else 0


def whole_run(engine: Engine, device: str, *, batch: int, prompt: int, output: int) -> Pace:
    """From the first token of all until the last one, with so many tokens for everybody."""
    names = set(started(engine, batch, prompt, output))
    synchronize(device)
    begin, steps, tokens = time.perf_counter(), 0, 0
    for number in _steps(engine):
        steps, tokens = steps + 1, tokens + number
    assert not engine.has_work and names
    return Pace(time.perf_counter() - begin, steps, tokens, prompt + output / 2)


def _steps(engine: Engine) -> Iterator[int]:
    while engine.has_work:
        yield _tokens_of(engine)
