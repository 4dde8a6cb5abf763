"""One model, engines on it that guess in different ways, and how fast each answers the same requests."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.harness import say
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.speculation.proposer import Proposer
from engine.weights.loader import LoadedModel, load_model
from text.block_hash import hash_block

MOST_SEQS = 32
Opened = Callable[[], Engine]


@dataclass(frozen=True)
class Task:
    """One request: token ids and how to sample."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Answered:
    """`decode_s`: from the step in which the last request got its first token to the end; `num_tokens` drawn in that time."""

    outputs: dict[str, tuple[int, ...]]
    decode_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s


class Bench:
    """Loads the model once. Engines share its weights and threads, so only one of them may step at a time."""

    def __init__(self, folder: Path, **settings: object) -> None:
        fields: dict[str, object] = {"num_blocks": 3072, "max_num_seqs": MOST_SEQS, "speculation": "none", **settings}
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


def _closing(engine: Engine) -> Engine:
    """Its pool goes when it does."""
    weakref.finalize(engine, engine.kv.close)
    return engine


def answer(engine: Engine, tasks: Sequence[Task]) -> Answered:
    """All tasks at once; ids are their numbers."""
    for number, task in enumerate(tasks):
        if not engine.add(EngineRequest(str(number), task.prompt, task.params)):
            raise RuntimeError(f"tasks: the engine takes no more than {number} at once")
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(tasks))}
    started_s, num_before = 0.0, 0
    while (result := engine.step()) is not None:
        for update in result.updates:
            outputs[update.request_id] += update.token_ids
        if not started_s and all(outputs.values()):
            started_s, num_before = time.perf_counter(), sum(map(len, outputs.values()))
    decode_s = time.perf_counter() - started_s
    engine.check_integrity()
    answers = {name: tuple(tokens) for name, tokens in outputs.items()}
    return Answered(answers, decode_s, sum(map(len, outputs.values())) - num_before)


def groups(tasks: Sequence[Task], batch: int) -> Iterator[Sequence[Task]]:
    """So many at a time; what is left over is left out."""
    for first in range(0, len(tasks) - batch + 1, batch):
        yield tasks[first : first + batch]


def speeds(engines: Mapping[str, Engine], tasks: Sequence[Task], batch: int, rounds: int) -> dict[str, float]:
    """Tokens per second of each engine over all tasks, `batch` at a time: the engines take turns at every group, the order turned
    round by round; medians over the rounds. Raises AssertionError when two engines answer differently."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        names = list(engines) if number % 2 == 0 else [*engines][::-1]
        total = {name: [0.0, 0] for name in names}
        for group in groups(tasks, batch):
            answers = {name: answer(engines[name], group) for name in names}
            first, *others = answers.values()
            assert all(other.outputs == first.outputs for other in others), "engines draw different tokens"
            for name, answered in answers.items():
                total[name][0] += answered.decode_s
                total[name][1] += answered.num_tokens
        for name, (seconds, tokens) in total.items():
            found[name].append(tokens / seconds)
        rates = "  ".join(f"{name} {values[-1]:.0f}/s" for name, values in found.items())
        say(f"round {number + 1}/{rounds} batch {batch}  {rates}")
    return {name: median(values) for name, values in found.items()}


def ratio(over: Opened, under: Opened, tasks: Sequence[Task], batch: int, rounds: int) -> float:
    """Tokens per second of the one to those of the other: the median of the rounds' ratios. Each round has new engines: what one
    has learned from these very tasks is none of the next one's."""
    ratios = []
    for _ in range(rounds):
        found = speeds({"over": over(), "under": under()}, tasks, batch, 1)
        ratios.append(found["over"] / found["under"])
    return median(ratios)
