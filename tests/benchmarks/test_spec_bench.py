"""The arithmetic of the speculation benchmark, and its runs, on a model that is a function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.spec.forced import Scripted, expected, right_run, timed
from benchmarks.spec.gain import Row, kept_by_depth, likeness, tasks_of
from benchmarks.spec.runs import Answering, Arriving, Output, Task, answer, as_many, counts, groups, guessed, staggered, together
from benchmarks.spec.safety import Turns, rates, take_turns, typical
from pdmesh.engine.engine import Engine
from pdmesh.engine.speculation.ngrams.lookahead import Lookahead
from pdmesh.engine.speculation.stats import ProposerStats, SpeculationStats
from pdmesh.sampling_params import SamplingParams
from tests.equality.speculation import answers, check_evidence, kinds_of
from tests.support.mock_engine import VOCAB_SIZE, make_engine

TASKS = [
    Task((5, 6, 7 + number), SamplingParams(temperature=0.7, seed=number, max_tokens=12, ignore_eos=True)) for number in range(5)
]


def with_script(right: float, length: int, script: Sequence[Output]) -> tuple[Engine, Scripted]:
    scripted = Scripted(right, length, VOCAB_SIZE)
    scripted.answers = [output.token_ids for output in script]
    return make_engine(proposers=[scripted], draft_length=length, num_blocks=64), scripted


def arriving(engine: Engine, batch: int) -> list[Output]:
    [answered] = together([Arriving(engine, TASKS, batch)])
    return answered.outputs


class TestForced:
    def test_expected_tokens_of_a_step(self) -> None:
        assert expected(1.0, 7) == 8
        assert expected(0.0, 7) == 1
        assert expected(0.5, 3) == pytest.approx((1 - 0.5**4) / (1 - 0.5))

    @given(st.sampled_from([0.5, 0.8, 0.9]), st.integers(1, 6))
    def test_runs_are_as_long_as_chance_would_have_them(self, right: float, length: int) -> None:
        runs = [right_run(right, (number + 0.5) / 1000) for number in range(1000)]
        assert sum(run >= length for run in runs) / 1000 == pytest.approx(right**length, abs=0.002)

    @pytest.mark.parametrize("right", [0.0, 1.0])
    def test_certainties(self, right: float) -> None:
        assert {right_run(right, at) > 10 for at in (0.0, 0.3, 0.999)} == {right == 1.0}

    @pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
    def test_acceptance_is_the_one_that_was_forced(self, right: float) -> None:
        task = replace(TASKS[0], params=replace(TASKS[0].params, max_tokens=361))
        plain = make_engine(num_blocks=128, max_context=400)
        script = answer(plain, [task]).outputs
        scripted = Scripted(right, 2, VOCAB_SIZE)
        scripted.answers = [output.token_ids for output in script]
        engine = make_engine(proposers=[scripted], draft_length=2, num_blocks=128, max_context=400)
        assert answer(engine, [task]).outputs == script
        stats = guessed(engine)
        assert stats.num_tokens / stats.num_rows == pytest.approx(expected(right, 2), rel=0.02)

    def test_steps_are_timed_by_their_tokens(self) -> None:
        engine, _ = with_script(1.0, 3, answer(make_engine(), TASKS[:1]).outputs)
        with timed(engine) as timer:
            answer(engine, TASKS[:1])
        assert sum(map(len, timer.seconds.values())) == engine.stats().num_steps
        assert 4 in timer.seconds
        with timed(engine) as again:
            pass
        assert again.runner is timer.runner, "the runner is back in its place"


class TestRuns:
    def test_arriving_tasks_are_answered_the_same(self) -> None:
        alone = [answer(make_engine(), [task]).outputs[0] for task in TASKS]
        assert arriving(make_engine(), 1) == alone
        for batch in (2, 4):
            found = arriving(make_engine(), batch)
            assert found == [output.first(len(each.token_ids)) for each, output in zip(found, alone, strict=True)]
            assert found[batch:] == alone[batch:], "only the first are cut"

    def test_tasks_arrive_beside_others_but_not_all_at_once(self) -> None:
        steps = {}
        for batch in (1, 2, 4):
            engine = make_engine()
            arriving(engine, batch)
            steps[batch] = engine.stats().num_steps
        assert steps[1] > steps[2] > steps[4]

    def test_the_first_tasks_end_one_after_the_other(self) -> None:
        lengths = [task.params.max_tokens for task in staggered([TASKS[0].shorter(8)] * 4)]
        assert lengths == [2, 4, 6, 8]

    def test_scripts_follow_their_tasks_through_batches(self) -> None:
        script = answers(make_engine(), TASKS, 5)
        engine, scripted = with_script(1.0, 3, script)
        assert answers(engine, TASKS, 2, scripted, script) == script
        verified, kept = counts(guessed(engine))
        assert verified == kept > 0

    def test_engines_that_answer_differently_are_found(self) -> None:
        other = [replace(task, params=replace(task.params, seed=99)) for task in TASKS]
        first, inner, last = make_engine(), make_engine(), make_engine()
        with pytest.raises(AssertionError, match="changed an answer"):
            take_turns(
                (first, last),
                inner,
                [TASKS[:2]],
                1,
                lambda engine, tasks: Answering(engine, other[:2] if engine is inner else tasks),
            )

    def test_rates_are_of_all_groups(self) -> None:
        found = rates({"a": make_engine(), "b": make_engine()}, list(groups(TASKS, 2)))
        assert found.keys() == {"a", "b"}
        assert min(found.values()) > 0

    def test_as_many_begins_again(self) -> None:
        assert as_many(TASKS[:2], 5) == [*TASKS[:2], *TASKS[:2], TASKS[0]]


class TestTurns:
    def test_the_ratios_of_the_turns_one_by_one(self) -> None:
        turns = Turns([[2.0, 3.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [[2.0, 3.0], [1.0, 1.0]])
        assert turns.ratios == [1.5, 2.0]

    def test_runs_that_were_held_up_do_not_count(self) -> None:
        assert typical([[9.0, 1.0, 8.0, 1.2], [2.0]]) == pytest.approx(3.1)

    def test_ratio_and_noise(self) -> None:
        turns = Turns([[2.0, 2.0, 2.0]], [[1.0, 1.0, 50.0]], [[2.0, 2.0, 2.0]])
        assert (turns.ratio, turns.noise) == (2.0, 1.0)

    def test_engines_step_in_turns_so_that_a_machine_that_gets_slower_favours_nobody(self) -> None:
        order: list[int] = []

        class Noted(Answering):
            def step(self) -> None:
                order.append(id(self.engine))
                super().step()

        engines = [make_engine(), make_engine(), make_engine()]
        turns = take_turns((engines[0], engines[2]), engines[1], [TASKS[:2]], 2, Noted)
        assert len(turns.before[0]) == len(turns.between[0]) == len(turns.after[0]) == 2
        rounds = [order[first : first + 3] for first in range(0, len(order), 3)]
        assert all(each == list(map(id, engines)) for each in rounds), "nobody has two turns in a row"


class TestEvidence:
    @pytest.mark.parametrize(
        ("verified", "kept", "may_be_right", "why"),
        [
            (0, 0, True, "heads: no drafted token was verified"),
            (9, 0, True, "heads: none of 9"),
            (9, 1, False, "heads: 1 of 9"),
            (0, 0, False, "heads: no drafted token was verified"),
        ],
    )
    def test_a_run_that_shows_nothing_fails(self, verified: int, kept: int, may_be_right: bool, why: str) -> None:
        with pytest.raises(AssertionError, match=why):
            check_evidence("heads", verified, kept, may_be_right=may_be_right)

    def test_enough(self) -> None:
        check_evidence("heads", 9, 1, may_be_right=True)
        check_evidence("wrong", 9, 0, may_be_right=False)


def test_kinds_are_drawn_in_all_ways_and_no_longer_than_the_others() -> None:
    long = replace(TASKS[0], params=replace(TASKS[0].params, max_tokens=500))
    kinds = kinds_of([(1,), (2, 3)], {"logprobs": [long]})
    assert [task.params.greedy for tasks in kinds.values() for task in tasks] == [True, True, False, False, False]
    assert len({task.params.seed for task in kinds["sampled"]}) == 2
    assert len({task.params.max_tokens for tasks in kinds.values() for task in tasks}) == 1


def test_a_proposer_that_begins_seldom_guesses_behind_wrong_guesses() -> None:
    wrong = Scripted(0.0, 4, VOCAB_SIZE)
    script = answers(make_engine(), TASKS, 5)
    engine = make_engine(proposers=[Lookahead(), wrong], draft_length=4, num_blocks=64)
    assert answers(engine, TASKS, 5, wrong, script) == script
    lookahead, both = counts(guessed(engine), "lookahead"), counts(guessed(engine))
    assert 0 < lookahead[0] < both[0]
    assert lookahead[1] == both[1]


def test_kept_by_depth_is_of_all_proposers() -> None:
    stats = SpeculationStats(by_proposer={"a": ProposerStats((4, 2, 0), (2, 1, 0)), "b": ProposerStats((4, 0, 0), (4, 0, 0))})
    assert kept_by_depth(stats) == (0.75, 0.5)
    assert kept_by_depth(SpeculationStats()) == ()


def test_a_row_of_the_study_is_markdown() -> None:
    row = Row("prose", "heads", 1.234, 1.5, (0.5, 0.25), 0.421)
    assert str(row) == "| prose | `heads` | 1.23 | 1.50 | 0.50 0.25 | 0.42 |"
    assert len(list(row.figures())) == 4


def test_prose_is_measured_greedy_and_sampled() -> None:
    greedy = [replace(task, params=replace(task.params, temperature=0.0)) for task in TASKS]
    prose = [task for pair in zip(greedy, TASKS, strict=True) for task in pair]
    kinds = tasks_of({"copying": TASKS[:1], "prose": prose})
    assert kinds == {"copying": TASKS[:1], "prose, greedy": greedy, "prose, sampled": TASKS}


def test_likeness() -> None:
    assert likeness((1, 2, 3), (1, 2, 3)) == 1.0
    assert likeness((1, 2, 3), (4, 5)) == 0.0
    assert likeness((1, 2, 3, 4), (1, 2, 9, 4)) == 0.75
