"""One model, engines on it that guess in different ways, and how fast each answers the same requests."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.outputs import StepResult, TokenLogprobs
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.sampling.grammar import Grammar
from pdmesh.engine.speculation.proposer import Proposer
from pdmesh.engine.speculation.stats import SpeculationStats
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block

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
    is_over: bool = field(default=False, compare=False)

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

    @property
    def s_per_token(self) -> float:
        return self.decode_s / self.num_tokens


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


class Answering:
    """One engine at one group of requests, a step at a time; ids are the tasks' numbers."""

    def __init__(self, engine: Engine, tasks: Sequence[Task]) -> None:
        """All tasks at once."""
        self.engine, self.tasks = engine, tasks
        self.outputs: list[Output] = []
        self.total_s = self._before_s = 0.0
        self._num_before = 0
        self._begin()

    def _begin(self) -> None:
        for task in self.tasks:
            self._add(task)

    @property
    def is_over(self) -> bool:
        return not self.engine.has_work

    def step(self) -> None:
        begun_s = time.perf_counter()
        result = self.engine.step()
        self.total_s += time.perf_counter() - begun_s
        _take(result, self.outputs)
        if not self._before_s and all(output.token_ids for output in self.outputs):
            self._before_s, self._num_before = self.total_s, num_drawn(self.outputs)

    def answered(self) -> Answered:
        """When it is over."""
        self.engine.check_integrity()
        return Answered(self.outputs, self.total_s, self.total_s - self._before_s, num_drawn(self.outputs) - self._num_before)

    def _add(self, task: Task) -> None:
        number = len(self.outputs)
        if not self.engine.add(EngineRequest(str(number), task.prompt, task.params, grammar=task.grammar)):
            raise RuntimeError(f"tasks: the engine takes no more than {number} at once")
        self.outputs.append(Output())


class Arriving(Answering):
    """About `batch` tasks at a time: another one arrives whenever as many tokens were drawn as a task may have, whether or not
    one has ended. Tokens are the clock, so that engines of any speed meet the same prompts beside the same outputs. The first are
    there at once, cut as those of `Refilled`.

    What is timed ends when the last task arrives. Behind that fewer and fewer sequences are left, for as many steps as the
    slowest of them has tokens, however many of the others' are drafted; in service others would have come by then."""

    def __init__(self, engine: Engine, tasks: Sequence[Task], batch: int) -> None:
        self._num_first = -(-batch * 7 // 8)  # a few more may be there for a while
        self._apart = sum(task.params.max_tokens for task in tasks) / len(tasks)
        self._until: tuple[float, int] | None = None  # seconds and tokens when the last task arrived
        super().__init__(engine, tasks)

    def _begin(self) -> None:
        for task in staggered(self.tasks[: self._num_first]):
            self._add(task)

    @property
    def is_over(self) -> bool:
        return len(self.outputs) == len(self.tasks) and not self.engine.has_work

    def step(self) -> None:
        while len(self.outputs) < len(self.tasks) and self._is_due(len(self.outputs)):
            self._until = (self.total_s, num_drawn(self.outputs))
            self._add(self.tasks[len(self.outputs)])
        super().step()

    def answered(self) -> Answered:
        """Prompts are computed all the time: what is timed is everything until then."""
        self.engine.check_integrity()
        assert self._until is not None, "tasks: no more than there are at once"
        until_s, num_tokens = self._until
        return Answered(self.outputs, self.total_s, until_s, num_tokens)

    def _is_due(self, number: int) -> bool:
        """Return whether a task arrives now. An engine that has nothing to do is given the next."""
        return num_drawn(self.outputs) / self._apart >= number - self._num_first + 1 or not self.engine.has_work


class Refilled(Answering):
    """`batch` tasks at a time: where one ends the next begins, as in service. What is timed are the steps of full batches, from
    the first in which all have their first token to that which leaves no task to begin.

    The first ones are cut to lengths from a `batch`-th of a task's to all of it, so that they end one after the other whether or
    not tasks are of one length. Otherwise engines without drafts would begin all of the next at once, behind what is timed, and
    those with drafts one by one within it."""

    def __init__(self, engine: Engine, tasks: Sequence[Task], batch: int) -> None:
        """Prompts should be in the prefix cache: they count as steps, too."""
        self._batch = batch
        self._full: tuple[float, int] | None = None  # seconds and tokens when the last task began
        super().__init__(engine, tasks)

    def _begin(self) -> None:
        for task in staggered(self.tasks[: self._batch]):
            self._add(task)

    def step(self) -> None:
        super().step()
        while len(self.outputs) < len(self.tasks) and sum(not output.is_over for output in self.outputs) < self._batch:
            self._add(self.tasks[len(self.outputs)])
            self._full = (self.total_s, num_drawn(self.outputs))

    def answered(self) -> Answered:
        plain = super().answered()
        if self._full is None:
            return plain
        until_s, num_tokens = self._full
        return Answered(self.outputs, self.total_s, until_s - self._before_s, num_tokens - self._num_before)


def staggered(tasks: Sequence[Task]) -> list[Task]:
    """The n-th cut to n parts of its answer, of as many parts as there are tasks."""
    return [task.shorter(max(2, task.params.max_tokens * number // len(tasks))) for number, task in enumerate(tasks, start=1)]


def answer(engine: Engine, tasks: Sequence[Task]) -> Answered:
    """All tasks at once, to their end."""
    [answered] = together([Answering(engine, tasks)])
    return answered


def together(answerings: Sequence[Answering]) -> list[Answered]:
    """To their ends, a step of each in turn: what the machine is doing beside them it does to all of them. Always in the same
    order: one that had two turns in a row would find the caches as it left them."""
    going = list(answerings)
    while going:
        for each in going:
            each.step()
        going = [each for each in going if not each.is_over]
    return [each.answered() for each in answerings]


def _take(result: StepResult | None, outputs: Sequence[Output]) -> None:
    for update in result.updates if result else ():
        outputs[int(update.request_id)].token_ids += update.token_ids
        outputs[int(update.request_id)].logprobs += update.logprobs
        outputs[int(update.request_id)].is_over = update.finish_reason is not None


def num_drawn(outputs: Sequence[Output]) -> int:
    return sum(len(output.token_ids) for output in outputs)


def groups(tasks: Sequence[Task], batch: int) -> Iterator[Sequence[Task]]:
    """So many at a time; what is left over is left out."""
    for first in range(0, len(tasks) - batch + 1, batch):
        yield tasks[first : first + batch]


def as_many(tasks: Sequence[Task], count: int) -> list[Task]:
    """The first `count`, from the beginning again where there are fewer."""
    return [tasks[number % len(tasks)] for number in range(count)]
