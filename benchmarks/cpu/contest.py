"""The contestants of `make bench-cpu` as running processes: installed, started, asked in turn, and left out with a reason."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from benchmarks.cpu.prompts import ANSWER, Prompts
from benchmarks.harness import PLAIN, say
from benchmarks.peers.catalogue import Contestant
from benchmarks.peers.environments import PeerError, ensure_environment, peers_folder
from benchmarks.peers.process import Child
from benchmarks.peers.weights import ensure_weights
from pdmesh.models.catalogue import ModelError

MAX_SEQS, _SANITY_TOKENS = 32, 8
# A pool for 32 sequences, every prompt computed in full, and each step for one token of a sequence, as with the others.
MEASURED: Mapping[str, object] = {"kv_memory_mb": 1024, "prefix_caching": False, **PLAIN}


@dataclass
class Seat:
    """A contestant with its process. `answer` is what it said to a plain question."""

    contestant: Contestant
    start: Callable[[bool], Child]
    child: Child
    answer: str = ""


@dataclass
class Contest:
    """Everybody who could be started, each paused until its turn; `absent` says why the others are not here."""

    model: str
    max_context: int
    prompts: Prompts
    seats: list[Seat] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for seat in self.seats:
            seat.child.close()

    def admit(self, contestants: Sequence[Contestant]) -> None:
        """Installs and starts each in turn."""
        for contestant in contestants:
            try:
                self._admit(contestant)
            except (PeerError, ModelError, OSError) as error:
                self.absent[contestant.name] = str(error)
                say(f"{contestant.name}: absent: {error}")

    def _admit(self, contestant: Contestant) -> None:
        python = ensure_environment(contestant.environment, say) if contestant.environment else None
        weights = ensure_weights(self.model, contestant.weights, say)

        def start(as_measured: bool) -> Child:
            return start_child(contestant, python, weights, self.max_context, as_measured=as_measured)

        say(f"{contestant.name}: starting")
        seat = Seat(contestant, start, start(True))
        try:
            seat.child.wait_ready()
            with seat.child.turn():
                seat.answer = self._ask(seat.child)
        except BaseException:
            seat.child.close()
            raise
        self.seats.append(seat)
        say(f"{contestant.name}: {seat.child.about.get('version', '')} says {seat.answer!r}")

    def _ask(self, child: Child) -> str:
        """A peer that does not know the answer has misread the weights: its speed means nothing."""
        answer = self.prompts.text(child.generate([self.prompts.question], _SANITY_TOKENS).token_ids[0])
        if ANSWER not in answer:
            raise PeerError(f"gives no sensible text: {answer!r}")
        return answer


def start_child(contestant: Contestant, python: Path | None, weights: Path, max_context: int, *, as_measured: bool) -> Child:
    """A process that loads the model. Not `as_measured`: our engine with all its defaults."""
    cores = sorted(os.sched_getaffinity(0))
    settings = {**contestant.settings, **(MEASURED if as_measured else {})} if contestant.is_ours else {}
    options = {"model": str(weights), "threads": len(cores), "max_seqs": MAX_SEQS, "max_context": max_context}
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(peers_folder() / "vllm-cache"),
        **contestant.variables,
    }
    folder = peers_folder() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / (re.sub(r"\W+", "-", contestant.name) + ".log")
    return Child(python or Path(sys.executable), contestant.module, {**options, "settings": settings}, log, variables)


def first_token_seconds(seat: Seat, question: Sequence[int]) -> float:
    """Wall time from starting a fresh process to its first token for a short prompt. PeerError: there was none."""
    child = seat.start(False)
    try:
        child.wait_ready()
        child.generate([question], 1)
        return time.monotonic() - child.started
    finally:
        child.close()
