"""The contestants of `make bench-cpu` as running processes: installed, started, asked in turn, and left out with a reason.

Small models stay in memory, each contestant paused until its turn. Of large ones only one is in memory at a time: in each round
every contestant starts, warms up, is measured and ends.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from benchmarks.cpu.cases import ANSWER, Case, Measured, Plan, Prefill, Prompts, TextPrompts, behind, cases_of
from benchmarks.cpu.limits import LIMIT_CASES
from benchmarks.harness import PLAIN, say
from benchmarks.peers.environments import Contestant, PeerError, ensure_environment, peers_folder
from benchmarks.peers.servers import Child
from benchmarks.peers.weights import Subject, ensure_weights
from pdmesh.models.catalogue import ModelError

MAX_SEQS, _SANITY_TOKENS = 32, 8
# A pool for 32 sequences, every prompt computed in full, and each step for one token of a sequence, as with the others.
MEASURED: Mapping[str, object] = {"kv_memory_mb": 1024, "prefix_caching": False, **PLAIN}
# A peer that is this much slower than the fastest one at a case is not asked again: it cannot be the one that counts.
CONTENDER_SHARE = 0.5
_COMPARED_PROMPTS = 8


@dataclass
class Seat:
    """A contestant with its process, if it has one now. `stays`: between its turns it is paused, not ended."""

    contestant: Contestant
    python: Path | None
    weights: Path
    max_context: int
    stays: bool
    child: Child | None = None
    extra_buffers: bool = True

    @property
    def name(self) -> str:
        return self.contestant.name

    @contextmanager
    def turn(self, cases: Sequence[Case], prompts: Prompts, plan: Plan) -> Iterator[Child]:
        """Run within, and pause or end after. Raises PeerError where it cannot be started."""
        child = self.child or self._open(cases, prompts, plan)
        self.child = child
        try:
            if self.stays:
                with child.turn():
                    yield child
            else:
                yield child
        finally:
            if not self.stays:
                self.close()

    def close(self) -> None:
        """End its process, if there is one."""
        if self.child is not None:
            self.child.close()
            self.child = None

    def start(self, *, as_measured: bool) -> Child:
        """Start a process that loads the model. Not `as_measured`: our engine with all its defaults."""
        contestant = self.contestant
        cores = sorted(os.sched_getaffinity(0))
        settings = {**contestant.settings, **(MEASURED if as_measured else {})} if contestant.is_ours else {}
        variables = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CACHE_ROOT": str(peers_folder() / "vllm-cache"),
            **contestant.variables,
        }
        options: dict[str, object] = {"library": contestant.library, "model": str(self.weights), "settings": settings}
        options |= {"threads": len(cores), "max_seqs": MAX_SEQS, "max_context": self.max_context}
        options |= {"extra_buffers": self.extra_buffers}
        folder = peers_folder() / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / (re.sub(r"\W+", "-", contestant.name) + ".log")
        return Child(self.python or Path(sys.executable), "benchmarks.peers.children", options, log, variables)

    def _open(self, cases: Sequence[Case], prompts: Prompts, plan: Plan) -> Child:
        """Start and warm up; llama.cpp without its kernels for AMX where they end it, as on virtual machines that announce it and
        have none."""
        try:
            return self._warm(cases, prompts, plan)
        except PeerError:
            if self.contestant.library != "llama.cpp" or not self.extra_buffers:
                raise
        self.extra_buffers = False
        say(f"{self.name}: once more, without its extra buffers")
        return self._warm(cases, prompts, plan)

    def _warm(self, cases: Sequence[Case], prompts: Prompts, plan: Plan) -> Child:
        say(f"{self.name}: starting")
        child = self.start(as_measured=True)
        try:
            child.wait_ready(plan.ready_s)
            for case in cases:
                case.warm_up(child, prompts, plan)
        except BaseException:
            child.close()
            raise
        return child


@dataclass
class Contest:
    """Those that can take part; `absent` says why the others cannot."""

    subject: Subject
    plan: Plan
    prompts: Prompts
    stays: bool
    seats: list[Seat] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for seat in self.seats:
            seat.close()

    def admit(self, contestants: Sequence[Contestant]) -> None:
        """Install each, and make its weights."""
        for contestant in contestants:
            try:
                python = ensure_environment(contestant.environment, say) if contestant.environment else None
                weights = ensure_weights(self.subject, contestant.weights, say)
            except (PeerError, ModelError, OSError) as error:
                self._leave_out(contestant.name, error)
                continue
            self.seats.append(Seat(contestant, python, weights, self.plan.max_context, self.stays))

    def measure(self, measured: Measured) -> None:
        """Measure all cases in turn, round after round, until the plan's time is over; what `measured` has is not measured
        again. The first round counts for nothing: slow contestants are found in it, and are not asked again."""
        started = time.monotonic()
        for number in range(self.plan.rounds):
            if number == 1:
                started = time.monotonic()
            if number and time.monotonic() - started > self.plan.limit_s:
                say(f"{number} rounds: the time is over")
                break
            say(f"round {number + 1}/{self.plan.rounds}")
            for name, case in LIMIT_CASES.items():
                if measured.wants(name, number):
                    measured.take(name, case)
            for seat, cases in self._visits():
                self._visit(seat, cases, measured, number)
                measured.keep()

    def _visits(self) -> list[tuple[Seat, Sequence[Case]]]:
        """Those that stay follow each other at each size; the others are measured at all sizes while they are there."""
        cases = cases_of(self.plan)
        if self.stays:
            return [(seat, [case]) for case in cases for seat in self.seats]
        return [(seat, cases) for seat in self.seats]

    def _visit(self, seat: Seat, cases: Sequence[Case], measured: Measured, number: int) -> None:
        wanted = [case for case in cases if self._wants(seat, case, measured, number)]
        if seat.name in self.absent or not wanted:
            return
        try:
            with seat.turn(cases_of(self.plan) if self.stays else wanted, self.prompts, self.plan) as child:
                self._get_to_know(seat, child, measured)
                for case in wanted:
                    name = case.name_of(seat.name)
                    measured.take(name, partial(case.measure, child, self.prompts, self.plan, number))
        except (PeerError, OSError) as error:
            self._leave_out(seat.name, error)
            for case in wanted:  # a part that goes on after it was cut off does not wait for this one again
                measured.failures.setdefault(case.name_of(seat.name), str(error))

    def _wants(self, seat: Seat, case: Case, measured: Measured, number: int) -> bool:
        name = case.name_of(seat.name)
        if not measured.wants(name, number):
            return False
        if seat.contestant.is_ours:
            return True
        shortest = Prefill(min(self.plan.prefills, default=0))
        if isinstance(case, Prefill) and self._is_behind(seat, shortest, measured) and name not in measured.samples:
            slow = f"behind {CONTENDER_SHARE:.0%} of the fastest one's speed at {shortest.length} tokens"
            measured.failures[name] = f"not asked: {slow}"
            return False
        return not self._is_behind(seat, case, measured)

    def _is_behind(self, seat: Seat, case: Case, measured: Measured) -> bool:
        rivals = [case.name_of(rival.name) for rival in self.seats if self._are_rivals(seat.contestant, rival.contestant)]
        return behind(case.name_of(seat.name), rivals, measured.medians, CONTENDER_SHARE)

    def _are_rivals(self, one: Contestant, other: Contestant) -> bool:
        """Large models are compared by their bits."""
        return not other.is_ours and (self.stays or (one.bits == 4) == (other.bits == 4))

    def _get_to_know(self, seat: Seat, child: Child, measured: Measured) -> None:
        """Ask once what it is and what it says. A peer that does not know the answer has misread the weights: its speed means
        nothing. Random weights have no answer: what they say is written down beside what our engine says."""
        if seat.name in measured.notes:
            return
        notes: dict[str, object] = dict(child.about)
        if isinstance(self.prompts, TextPrompts):
            answer = self.prompts.text(child.generate([self.prompts.question], _SANITY_TOKENS).token_ids[0])
            notes["answer"] = answer
            if ANSWER not in answer:
                raise PeerError(f"gives no sensible text: {answer!r}")
        else:
            prompts = self.prompts.deal("compared", _COMPARED_PROMPTS, self.plan.prompt_tokens)
            notes["first tokens"] = [ids[0] for ids in child.generate(prompts, 1).token_ids]
        if not seat.extra_buffers:
            notes["without"] = "its kernels for AMX, with which it ends here"
        measured.notes[seat.name] = notes
        say(f"{seat.name}: {notes}")

    def _leave_out(self, name: str, error: Exception) -> None:
        self.absent[name] = str(error)
        say(f"{name}: left out: {error}")


def first_token_seconds(seat: Seat, question: Sequence[int]) -> float:
    """Return the wall time from starting a fresh process to its first token for a short prompt. Raises PeerError: there was
    none."""
    child = seat.start(as_measured=False)
    try:
        child.wait_ready()
        child.generate([question], 1)
        return time.monotonic() - child.started
    finally:
        child.close()
