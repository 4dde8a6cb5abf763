"""The modelled worker: the same times as one that takes every step by itself, and nothing left behind."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.planning.latency_model import Work
from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.workers.kv_room import Sequence
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.worker import ModelledWorker, figures_of
from tests.simulator.naive_worker import Job, NaiveWorker
from tests.simulator.specs import SMALL

TIGHT = replace(SMALL, num_blocks=44, max_num_seqs=8)
"""Its rows outgrow it."""
Times = list[tuple[float | None, float | None]]


class Recorder:
    """Lets jobs into a modelled worker and notes when their tokens come."""

    def __init__(self, spec: WorkerSpec, jobs: list[Job]) -> None:
        self.events = EventQueue()
        self.worker = ModelledWorker("w", spec, self.events)
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.num_refused, self._num_jobs = 0, len(jobs)
        for number, job in enumerate(jobs):
            self.events.at(job.at_s, self._come, number, job)

    def run(self) -> Times:
        self.events.run()
        return [(self.first.get(number), self.last.get(number)) for number in range(self._num_jobs)]

    def look(self) -> None:
        figures_of(self.worker, self.events.now)

    def on_prompt(self, sequence: Sequence, at_s: float) -> None:
        assert isinstance(sequence.tag, int)
        self.first.setdefault(sequence.tag, at_s)
        self.last[sequence.tag] = at_s
        if sequence.prefill_only:
            self.events.at(at_s, self.worker.call, lambda _: self.worker.let_go(sequence))

    def on_end(self, sequence: Sequence, at_s: float) -> None:
        assert isinstance(sequence.tag, int)
        self.last[sequence.tag] = at_s

    def _come(self, number: int, job: Job) -> None:
        sequence = Sequence(self, number, job.num_input, job.num_output, goal_s=job.goal_s, prefill_only=job.is_prefill)
        self.worker.call(lambda _: self._enter(sequence))

    def _enter(self, sequence: Sequence) -> None:
        if sequence.prefill_only:
            taken = self.worker.prefill(sequence)
        else:
            taken = self.worker.reserve(sequence)
            if taken:
                self.worker.run_local(sequence)
        self.num_refused += not taken


def jobs_of(draws: list[tuple[float, int, int, float, bool]]) -> list[Job]:
    at_s, jobs = 0.0, []
    for gap_s, num_input, num_output, goal_s, is_prefill in draws:
        at_s += gap_s
        jobs.append(Job(at_s, num_input, 1 if is_prefill else num_output, 0.0 if is_prefill else goal_s, is_prefill))
    return jobs


def loads(
    *, prefills: bool = True, goals: tuple[float, ...] = (0.0,), max_gap_s: float = 0.5, max_input: int = 150
) -> st.SearchStrategy[list[Job]]:
    gap_s = st.floats(0.0013, max_gap_s).map(lambda gap: gap * 1.000717)
    kinds = st.booleans() if prefills else st.just(False)
    job = st.tuples(gap_s, st.integers(1, max_input), st.integers(1, 60), st.sampled_from(goals), kinds)
    return st.lists(job, min_size=1, max_size=16).map(jobs_of)


def same(ours: Times, theirs: Times, within_s: float = 1e-9) -> None:
    assert len(ours) == len(theirs)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == its or mine == pytest.approx(its, abs=within_s, rel=1e-9)


@given(loads())
def test_times_are_those_of_single_steps(jobs: list[Job]) -> None:
    recorder, naive = Recorder(SMALL, jobs), NaiveWorker(SMALL)
    same(recorder.run(), naive.run(jobs))
    assert recorder.worker.is_empty
    assert recorder.worker.counters.num_steps == naive.num_steps


@given(loads())
def test_what_passes_between_steps_is_added_to_each(jobs: list[Job]) -> None:
    spec = replace(SMALL, between_s=1.3e-3)
    same(Recorder(spec, jobs).run(), NaiveWorker(spec).run(jobs))


@given(loads(goals=(0.0, 0.0055, 0.0065, 0.009, 0.02), max_gap_s=0.03, max_input=400))
@settings(max_examples=200)
def test_paces_are_those_of_single_rows(jobs: list[Job]) -> None:
    """The size of a chunk is cut to whole tokens: where the two sums round differently, by one."""
    same(Recorder(SMALL, jobs).run(), NaiveWorker(SMALL).run(jobs), within_s=20 * SMALL.speed.per_prefill_token_s)


@given(loads(prefills=False))
@settings(max_examples=200)
def test_preempts_whom_a_worker_of_single_steps_preempts(jobs: list[Job]) -> None:
    jobs = [replace(job, at_s=job.at_s / 8) for job in jobs]
    recorder, naive = Recorder(TIGHT, jobs), NaiveWorker(TIGHT)
    same(recorder.run(), naive.run(jobs))
    assert recorder.worker.counters.num_preemptions == naive.num_preemptions
    assert recorder.worker.room.num_used == 0


def test_preemption_happens() -> None:
    jobs = [Job(0.001 * number, 40, 60) for number in range(5)]
    recorder = Recorder(TIGHT, jobs)
    recorder.run()
    assert recorder.worker.counters.num_preemptions > 0
    assert len(recorder.last) == 5


@given(loads(), st.lists(st.floats(0.0, 3.0), max_size=20))
def test_looking_changes_nothing(jobs: list[Job], looks: list[float]) -> None:
    quiet, watched = Recorder(SMALL, jobs), Recorder(SMALL, jobs)
    for at_s in looks:
        watched.events.at(at_s, watched.look)
    same(watched.run(), quiet.run(), within_s=0.0)


@given(loads(prefills=False))
def test_tokens_are_conserved(jobs: list[Job]) -> None:
    recorder = Recorder(SMALL, jobs)
    recorder.run()
    done = [jobs[number] for number in recorder.last]
    counters = recorder.worker.counters
    assert counters.num_prefilled == sum(job.num_input for job in done)
    assert counters.num_generated == sum(job.num_output for job in done)
    assert recorder.worker.num_to_prefill == 0


@given(loads(prefills=False), st.floats(0.01, 2.0))
def test_figures_are_those_of_single_steps(jobs: list[Job], at_s: float) -> None:
    """Whoever asks in the middle of many steps hears of as many as have ended."""
    recorder = Recorder(SMALL, jobs)
    recorder.events.run(until_s=at_s)
    figures = figures_of(recorder.worker, at_s)
    assert figures.taken_at <= at_s
    assert 0 <= figures.num_free_blocks <= SMALL.num_blocks
    assert figures.num_decoding <= figures.decode_context or figures.num_decoding == 0
    assert figures.num_running + figures.num_waiting <= SMALL.max_num_seqs


def test_figures_in_the_middle_of_many_steps() -> None:
    recorder = Recorder(SMALL, [Job(0.0, 10, 50)])
    prompt_s = SMALL.speed.step_s(Work(10, 55))
    steps_s = [SMALL.speed.decode_s(1, 11 + number) for number in range(49)]
    at_s = prompt_s + sum(steps_s[:20]) + 0.5 * steps_s[20]
    recorder.events.run(until_s=at_s)
    figures = figures_of(recorder.worker, at_s)
    assert figures.taken_at == pytest.approx(prompt_s + sum(steps_s[:20]))
    assert (figures.num_decoding, figures.decode_context) == (1, 31)
    assert figures.num_free_blocks == SMALL.num_blocks - -(-30 // SMALL.block_size)
    assert figures.num_steps == 21
    assert figures.num_generated_tokens == 21


def test_nobody_is_told_of_a_prompt_before_the_end_of_its_first_step() -> None:
    """The engine counts at the end of a step, and hears what it is asked behind that."""
    recorder = Recorder(SMALL, [Job(0.0, 200, 4)])
    step_s = SMALL.speed.step_s(Work(96, 96 * 97 // 2))
    recorder.events.run(until_s=step_s / 2)
    early = figures_of(recorder.worker, step_s / 2)
    assert (early.taken_at, early.num_waiting_tokens, early.num_prefilling, early.num_free_blocks) == (
        0.0,
        0,
        0,
        SMALL.num_blocks,
    )
    recorder.events.run(until_s=1.5 * step_s)
    late = figures_of(recorder.worker, 1.5 * step_s)
    assert late.taken_at == pytest.approx(step_s)
    assert (late.num_waiting_tokens, late.num_prefilling) == (104, 1)


def test_a_reservation_waits_for_the_end_of_the_step() -> None:
    recorder = Recorder(SMALL, [Job(0.0, 90, 2)])
    at: list[float] = []
    recorder.events.at(1e-4, recorder.worker.call, at.append)
    recorder.run()
    assert at == [pytest.approx(SMALL.speed.step_s(Work(90, 90 * 91 // 2)))]


def test_an_idle_worker_answers_at_once() -> None:
    recorder = Recorder(SMALL, [])
    at: list[float] = []
    recorder.events.at(2.0, recorder.worker.call, at.append)
    recorder.events.run()
    assert at == [2.0]


def test_seats_and_blocks_bound_what_is_taken() -> None:
    jobs = [Job(1e-5 * number, 8, 40) for number in range(SMALL.max_num_seqs + 3)]
    recorder = Recorder(SMALL, jobs)
    recorder.run()
    assert recorder.num_refused == 3
    large = Recorder(SMALL, [Job(0.0, SMALL.num_blocks * SMALL.block_size + 1, 1)])
    large.run()
    assert large.num_refused == 1
