"""One model, engines on it that guess in different ways, and how fast each answers the same requests."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.grammar import Grammar
from engine.outputs import StepResult, TokenLogprobs
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.speculation.proposer import Proposer
from engine.speculation.tally import SpeculationStats
from engine.weights.loader import LoadedModel, load_model
from text.block_hash import hash_block

MOST_SEQS = 32
Opened = Callable[[], Engine]


@dataclass(frozen=True)
class Task:
    """One request: token ids and how to sample. `right`: the answer to a task that has one."""

    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None
    right: tuple[int, ...] = ()

    def shorter(self, max_tokens: int) -> Task:
        """With at most so many tokens to answer."""
        return replace(self, params=replace(self.params, max_tokens=min(max_tokens, self.params.max_tokens)))


@dataclass
class Output:
    """What one request was answered: two that are equal are so bit for bit, log-probabilities too."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def first(self, count: int) -> Output:
        return Output(self.token_ids[:count], self.logprobs[:count])


@dataclass(frozen=True)
class Answered:
    """`total_s`: from the first step to the end. `decode_s`: from the step in which the last request got its first token to the
    end; `num_tokens` drawn in that time."""

    outputs: list[Output]
    total_s: float
    decode_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s


class Bench:
    """Loads the model once. Engines share its weights and threads, so only one of them may step at a time."""

    def __init__(self, folder: Path, **settings: object) -> None:
        fields: dict[str, object] = {"num_blocks": 4096, "max_num_seqs": MOST_SEQS, "speculation": "none", **settings}
        self.config = EngineConfig(model=str(folder), **fields)  # type: ignore[arg-type]
        self.loaded: LoadedModel = load_model(self.config)

    def engine(self, proposers: Sequence[Proposer] = (), **settings: object) -> Engine:
        """An engine with these proposers."""
        config = replace(self.config, **settings)  # type: ignore[arg-type]
        return _closing(Engine(config, hash_block=hash_block, loaded=self.loaded, proposers=proposers))

    def guessing(self, names: str, **settings: object) -> Engine:
        """An engine with the proposers that `--speculation` names so."""
        config = replace(self.config, speculation=names, **settings)  # type: ignore[arg-type]
        return _closing(Engine(config, hash_block=hash_block, loaded=self.loaded))


def of_length(length: int) -> dict[str, int]:
    """Settings of an engine whose drafts have so many tokens, whatever they cost; no proposer is asked for more than that."""
    return {"draft_length": length, "max_draft_tokens": length}


def _closing(engine: Engine) -> Engine:
    """Its pool goes when it does."""
    weakref.finalize(engine, engine.kv.close)
    return engine


def guessed(engine: Engine) -> SpeculationStats:
    """Since it was opened; zeros where nobody guesses."""
    return SpeculationStats() if engine.speculator is None else engine.speculator.tally.stats()


def counts(stats: SpeculationStats, proposer: str | None = None) -> tuple[int, int]:
    """Drafted tokens that were verified, and those of them that were kept; of one proposer, or of all."""
    each = [one for name, one in stats.by_proposer.items() if proposer in (None, name)]
    return sum(one.num_verified for one in each), sum(one.num_kept for one in each)


def answer(engine: Engine, tasks: Sequence[Task]) -> Answered:
    """All tasks at once; ids are their numbers."""
    for number, task in enumerate(tasks):
        _add(engine, number, task)
    outputs = [Output() for _ in tasks]
    begun_s = time.perf_counter()
    started_s, num_before = 0.0, 0
    while (result := engine.step()) is not None:
        _take(result, outputs)
        if not started_s and all(output.token_ids for output in outputs):
            started_s, num_before = time.perf_counter(), num_drawn(outputs)
    ended_s = time.perf_counter()
    engine.check_integrity()
    return Answered(outputs, ended_s - begun_s, ended_s - started_s, num_drawn(outputs) - num_before)


def answer_arriving(engine: Engine, tasks: Sequence[Task], batch: int) -> Answered:
    """About `batch` tasks at a time: another one arrives whenever so many more tokens were drawn that it is due, whether or not
    others have ended. Tokens are the clock, so that engines of any speed meet the same prompts beside the same outputs."""
    apart = sum(task.params.max_tokens for task in tasks) / len(tasks) / batch
    outputs: list[Output] = []
    begun_s = time.perf_counter()
    while len(outputs) < len(tasks) or engine.has_work:
        while len(outputs) < len(tasks) and _is_due(len(outputs), num_drawn(outputs) / apart, engine, batch):
            _add(engine, len(outputs), tasks[len(outputs)])
            outputs.append(Output())
        result = engine.step()
        _take(result, outputs)
    total_s = time.perf_counter() - begun_s
    engine.check_integrity()
    return Answered(outputs, total_s, total_s, num_drawn(outputs))


def _is_due(number: int, clock: float, engine: Engine, batch: int) -> bool:
    """The first half of a batch at once; then one by one. An engine that has nothing to do is given the next."""
    return clock >= number - batch // 2 or not engine.has_work


def _add(engine: Engine, number: int, task: Task) -> None:
    if not engine.add(EngineRequest(str(number), task.prompt, task.params, grammar=task.grammar)):
        raise RuntimeError(f"tasks: the engine takes no more than {number} at once")


def _take(result: StepResult | None, outputs: Sequence[Output]) -> None:
    for update in result.updates if result else ():
        outputs[int(update.request_id)].token_ids += update.token_ids
        outputs[int(update.request_id)].logprobs += update.logprobs


def num_drawn(outputs: Sequence[Output]) -> int:
    return sum(len(output.token_ids) for output in outputs)


def groups(tasks: Sequence[Task], batch: int) -> Iterator[Sequence[Task]]:
    """So many at a time; what is left over is left out."""
    for first in range(0, len(tasks) - batch + 1, batch):
        yield tasks[first : first + batch]


def as_many(tasks: Sequence[Task], count: int) -> list[Task]:
    """The first `count`, from the beginning again where there are fewer."""
    return [tasks[number % len(tasks)] for number in range(count)]
