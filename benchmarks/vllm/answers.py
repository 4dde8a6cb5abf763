"""What is compared: the tokens of answers, and by how little the likeliest token led where they begin to differ. Pure, but for
the child process that computes the answers of one vLLM alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.engine_runs import GREEDY, Draw
from benchmarks.harness import Figure, say
from benchmarks.models.equality import equal_share
from benchmarks.peers.servers import Child, log_of
from pdmesh.launcher.plan import LocalMeshConfig, engine_python
from pdmesh.worker.engines.registry import start_timeout_s
from pdmesh.worker.engines.vllm_settings import environment

ENGINE, EAGER = "vllm", "enforce_eager=true"
STOCK = "stock vLLM alone"


@dataclass(frozen=True)
class Answer:
    """The tokens of one prompt's answer. `gaps`: of each token, by how much it led the next candidate (nats); () where it was not
    asked. `evidence`: how much of what a way is named after happened to it."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...] = ()
    evidence: int = 0


Answers = Mapping[int, Answer]
"""Answers by the number of their prompt."""


@dataclass(frozen=True)
class Comparison:
    """Answers beside those expected. `margin`: the smallest gap where an answer begins to differ; None where none does."""

    num_answers: int
    answers_equal: float
    tokens_equal: float
    margin: float | None
    evidence: int

    @property
    def margin_text(self) -> float | str:
        """Return the margin as a figure says it."""
        return "no answer differs" if self.margin is None else self.margin


def compared(found: Answers, expected: Answers) -> Comparison:
    """Return how answers compare with those expected, which must have one for each of their prompts, with gaps. Pure."""
    pairs = [(answer, expected[number]) for number, answer in found.items()]
    margins = [margin for answer, wanted in pairs if (margin := _margin(answer.token_ids, wanted)) is not None]
    return Comparison(
        num_answers=len(pairs),
        answers_equal=sum(answer.token_ids == wanted.token_ids for answer, wanted in pairs) / len(pairs),
        tokens_equal=equal_share([list(wanted.token_ids) for _, wanted in pairs], [list(one.token_ids) for one, _ in pairs]),
        margin=min(margins, default=None),
        evidence=sum(answer.evidence for answer in found.values()),
    )


def _margin(token_ids: Sequence[int], wanted: Answer) -> float | None:
    """Return the gap at the first difference; infinite where an answer ends early or is too long, which no margin excuses."""
    if token_ids == wanted.token_ids:
        return None
    pairs = enumerate(zip(token_ids, wanted.token_ids, strict=False))
    first = next((index for index, (one, other) in pairs if one != other), None)
    return math.inf if first is None else wanted.gaps[first]


def figures_of(name: str, comparison: Comparison, peer: str, *, goal: float | None = 1.0) -> list[Figure]:
    """Return a comparison's figures. Pure."""
    shares: list[tuple[str, float, float | None]] = [
        ("answers equal", comparison.answers_equal, goal),
        ("tokens equal", comparison.tokens_equal, None),
    ]
    unit = f"share of {comparison.num_answers} answers"
    return [
        *(Figure(f"{name}: {what}", value, unit, "higher", goal=asked, peer=peer) for what, value, asked in shares),
        Figure(f"{name}: smallest lead of the expected token at a first difference", comparison.margin_text, "nats", "lower"),
    ]


def absent(name: str, why: str, unit: str = "share", better: Literal["higher", "lower"] = "higher") -> Figure:
    """Return the figure of what could not be measured, with the reason. Pure."""
    return Figure(name, f"absent: {' '.join(why.split())[:400]}", unit, better)


# One vLLM alone, in a process of its own.


@dataclass(frozen=True)
class Settings:
    """What a worker, and vLLM alone, compute with. `adapters`: folders by name."""

    model: Path
    dtype: str
    threads: int = 1
    kv_memory_mb: int = 512
    vllm_args: tuple[str, ...] = (EAGER,)
    adapters: Mapping[str, Path] = field(default_factory=dict)

    @property
    def flags(self) -> tuple[str, ...]:
        """Return them as a worker's flags; its model and threads are the mesh's."""
        each = [("--vllm-arg", argument) for argument in self.vllm_args]
        each += [("--lora", f"{name}={folder}") for name, folder in self.adapters.items()]
        each += [("--dtype", self.dtype), ("--kv-memory-mb", str(self.kv_memory_mb))]
        return tuple(part for pair in each for part in pair)

    def mesh(self, **fields: Any) -> LocalMeshConfig:
        """Return a mesh of such workers, as `pdmesh up --engine vllm` makes it. Raises StartFailed without vLLM."""
        return LocalMeshConfig(
            model=str(self.model),
            engine=ENGINE,
            worker_python=engine_python(ENGINE, "cpu"),
            port=0,
            num_threads=self.threads,
            start_timeout_s=start_timeout_s(ENGINE),
            worker_args=self.flags,
            **fields,
        )

    def options(self, kind: str) -> dict[str, object]:
        """Return what `child` is told."""
        adapters = {name: str(folder) for name, folder in self.adapters.items()}
        own = {"dtype": self.dtype, "threads": self.threads, "kv_memory_mb": self.kv_memory_mb, "vllm_args": self.vllm_args}
        return {"kind": kind, "model": str(self.model), "adapters": adapters, **own}


class Alone:
    """One vLLM of the kind "stock" or "composed"."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def ask(
        self,
        prompts: Mapping[int, Sequence[int]],
        num_tokens: int,
        draw: Draw = GREEDY,
        *,
        together: bool = False,
        again: bool = False,
        emitted: Mapping[int, Sequence[int]] | None = None,
        adapter: str = "",
    ) -> dict[int, Answer]:
        """Return the answers, one request at a time or all `together`, for the first time or `again`, or what follows tokens that
        were `emitted`. Raises PeerError."""
        asked = {"prompts": [list(prompt) for prompt in prompts.values()], "max_tokens": num_tokens, "adapter": adapter}
        begun = [list((emitted or {}).get(number, ())) for number in prompts]
        how = {"temperature": draw.temperature, "seed": draw.seed, "together": together, "again": again, "emitted": begun}
        reply: Any = self._child.ask({**asked, **how}, f"answering {len(prompts)} prompts")
        answers = [Answer(tuple(each["token_ids"]), tuple(each["gaps"])) for each in reply["answers"]]
        return dict(zip(prompts, answers, strict=True))


@contextmanager
def alone(kind: str, settings: Settings) -> Iterator[Alone]:
    """Start it and end it. Raises PeerError with vLLM's last words, or StartFailed where it is not installed."""
    say(f"one {kind} vLLM alone, {settings.dtype}: starting")
    python, log = Path(engine_python(ENGINE, "cpu")), log_of(f"vllm-{kind}")
    log.parent.mkdir(parents=True, exist_ok=True)
    child = Child(python, "benchmarks.vllm.child", settings.options(kind), log, _variables(settings))
    try:
        child.wait_ready()
        yield Alone(child)
    finally:
        child.close()


def _variables(settings: Settings) -> dict[str, str]:
    """Return the environment that a worker's process gets from the launcher, and sets itself."""
    from benchmarks.vllm.child import worker_config

    openmp = {"OMP_NUM_THREADS": str(settings.threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    return {**environment(worker_config(settings.options(""))), **openmp}
