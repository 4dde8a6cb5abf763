"""Every answer is checked: another answer to the same request, a missing end and an error that nobody caused are found."""

import pytest

from pdmesh.errors import InvalidArgument, Overloaded, Unavailable
from tests.soak.cases import Case, Cases, next_turn
from tests.soak.ledger import Ledger, incomplete, is_about, is_refusal
from tests.soak.report import Soak
from tests.soak.samples import ProcessSample, Sample
from tests.soak.sides.base import Answer, ChoiceAnswer

CASE = Case({"max_tokens": 3, "ignore_eos": True}, prompt=(1, 2), key="known 1")


def _answer(*tokens: int, text: str = "abc", finish: str = "length", ended: bool = True) -> Answer:
    return Answer([ChoiceAnswer(text, list(tokens), finish=finish)], ended=ended)


def test_the_same_answer_is_right_whoever_gets_it() -> None:
    ledger = Ledger()
    ledger.answered("pdmesh", CASE, _answer(5, 6, 7))
    ledger.answered("kserve", CASE, _answer(5, 6, 7))
    assert (ledger.problems, ledger.num_compared, ledger.counts["complete"]) == ([], 2, 2)


@pytest.mark.parametrize("other", [_answer(5, 6, 8), _answer(5, 6, 7, text="abd")])
def test_another_answer_to_the_same_request_is_a_problem(other: Answer) -> None:
    ledger = Ledger()
    ledger.answered("pdmesh", CASE, _answer(5, 6, 7))
    ledger.answered("kserve", CASE, other)
    assert "pdmesh got" in ledger.problems[0]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (_answer(5, 6), "2 tokens instead of 3"),
        (_answer(5, 6, 7, finish=""), "ended with ''"),
        (_answer(5, 6, 7, ended=False), "without its end"),
    ],
)
def test_an_incomplete_answer_is_a_problem(answer: Answer, problem: str) -> None:
    assert problem in " ".join(incomplete(CASE, answer))


def test_constraints_and_stop_strings_are_kept_to() -> None:
    regex = Case({"max_tokens": 9, "regex": "[0-9]+"})
    assert incomplete(regex, _answer(1, text="12", finish="stop")) == []
    assert incomplete(regex, _answer(1, text="1x", finish="stop"))
    schema = Case({"max_tokens": 9, "json_schema": "{}"})
    assert incomplete(schema, _answer(1, text="{", finish="length")) == []
    assert incomplete(schema, _answer(1, text="{", finish="stop"))
    assert incomplete(Case({"max_tokens": 9, "stop": ["b"]}), _answer(1, text="abc", finish="stop"))


def test_only_overload_with_a_delay_is_a_refusal() -> None:
    assert is_refusal("openai", Overloaded("full", retry_delay_s=0.5))
    assert not is_refusal("openai", Overloaded("never fits"))
    assert not is_refusal("openai", Unavailable("gone", retry_delay_s=0.5))


def test_a_refusal_of_what_is_malformed_names_the_field() -> None:
    assert is_about("top_p", InvalidArgument("sampling.top_p", "3.0 is not in (0, 1]"))
    assert not is_about("top_p", InvalidArgument("sampling.min_p", "2.0 is not in [0, 1]"))
    assert not is_about("top_p", Unavailable("top_p"))


def test_the_same_seed_draws_the_same_requests() -> None:
    first, second = Cases(3), Cases(3)
    assert [first.fresh() for _ in range(50)] == [second.fresh() for _ in range(50)]
    keys = [first.known().key for _ in range(500)]
    assert len(set(keys)) < len(keys)


def test_a_conversation_goes_on_behind_its_answers() -> None:
    case: Case | None = Cases(3).conversation()
    turns = 0
    while case is not None:
        turns += 1
        last, case = case, next_turn(case, f"answer {turns}")
    assert turns == 3
    assert [role for role, _ in last.messages] == ["system", "user", "assistant", "user", "assistant", "user"]


def _soak(*, fds: int = 20, leak_mb: float = 0.0, refused: int = 5) -> Soak:
    samples = []
    for number in range(30):
        process = ProcessSample(100 + leak_mb * number, 110, 90, 5, 20 if number < 15 else fds, 9)
        samples.append(Sample(10.0 * number, 200 * number, {"router-0": process}, {}, 0, 0, 0, 5.0))
    ledger = Ledger()
    ledger.counts["refused in a burst"] = refused
    return Soak(ledger, samples, 300.0)


def test_a_quiet_run_has_no_problems() -> None:
    run = _soak()
    assert run.problems == []
    header, *rows = run.table()
    assert {len(row.split("; ")) for row in rows} == {len(header.split("; "))}


def test_a_run_that_was_cut_short_is_a_problem() -> None:
    run = _soak()
    del run.samples[4:]
    assert "too few" in " ".join(run.problems)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (_soak(fds=40), "open files of router-0 went from 20 to 40"),
        (_soak(leak_mb=1.0), "grows by 5.00 MB"),
        (_soak(refused=0), "no burst was refused"),
    ],
)
def test_whatever_grows_is_a_problem(run: Soak, problem: str) -> None:
    assert problem in " ".join(run.problems)
