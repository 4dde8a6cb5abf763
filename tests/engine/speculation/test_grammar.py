"""Guesses beside everything that may change a draw: grammars, penalties, cuts of the vocabulary, log-probabilities, ends. What an
engine that guesses answers is what one answers that does not, to the last bit of a probability."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.sampling.grammar import Bits
from pdmesh.engine.scheduler.sequence import Sequence
from pdmesh.engine.speculation import guarded_proposer
from pdmesh.engine.speculation.draft import Draft
from pdmesh.engine.speculation.guarded_proposer import follow
from pdmesh.text.grammar import GrammarMatcher
from tests.engine.backends import BACKENDS
from tests.engine.constrained import Answers, Model, requests, run, run_apart, tokens
from tests.support.guesser import Guesser
from tests.support.tiny_models import IM_END, VOCAB_SIZE

GUESSERS = {
    "right": (1.0, False),
    "wrong": (0.0, False),
    "half": (0.5, False),
    "right tree": (1.0, True),
    "wrong first": (0.0, True),
    "half tree": (0.5, True),
}
DRAWS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    "top k": {"top_k": 7},
    "top p": {"top_p": 0.6, "min_p": 0.02},
    "no end": {"min_tokens": 20, "stop_token_ids": tuple(range(0, 160, 3)), "ignore_eos": False},
    "everything": {"top_k": 90, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
}


class Reader(Guesser):
    """Has read the answers of an engine that does not guess."""

    vocab_size = VOCAB_SIZE

    def __init__(self, answers: Answers, right: float, *, branches: bool = False) -> None:
        super().__init__(right, branches=branches)
        self._answers = answers

    def truth(self, sequence: Sequence, output: list[int]) -> int:
        [choice] = sequence.choices
        told, place = self._answers[sequence.group.request.request_id, choice].token_ids, len(output)
        return told[place] if output == told[:place] and place < len(told) else ord("a")


def with_logprobs(each: EngineRequest) -> EngineRequest:
    """Nothing that a grammar forces skips the model then."""
    return replace(each, request_id=f"{each.request_id} told", sampling=replace(each.sampling, logprobs=3))


def unconstrained(model: Model, name: str, **sampling: object) -> EngineRequest:
    params = {"ignore_eos": True, "max_tokens": 30, **sampling}
    return replace(model.request(name, **params), grammar=None)  # type: ignore[arg-type]


def constrained(model: Model) -> list[EngineRequest]:
    asked = [each for each in requests(model) if each.grammar is not None]
    drawn = [model.request(f"{name} in JSON", **DRAWS[name]) for name in ("top p", "everything")]  # type: ignore[arg-type]
    return [*asked, *drawn, *map(with_logprobs, asked)]


def free(model: Model) -> list[EngineRequest]:
    asked = [unconstrained(model, name, n=2, **sampling) for name, sampling in DRAWS.items()]
    return [*asked, *map(with_logprobs, asked)]


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.make(tmp_path_factory.mktemp("grammar"), request.param)


@pytest.fixture(scope="module")
def expected(model: Model) -> Answers:
    """Each alone, in an engine that does not guess."""
    answers: Answers = {}
    for each in [*constrained(model), *free(model)]:
        answers.update(run(model.engine(prefix_caching=False), each))
    return answers


@pytest.fixture(params=GUESSERS)
def reader(request: pytest.FixtureRequest, expected: Answers) -> Reader:
    right, branches = GUESSERS[request.param]
    return Reader(expected, right, branches=branches)


class Cuts:
    """Counts the drafted tokens that a grammar does not allow."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_cut = 0
        patch.setattr(guarded_proposer, "follow", self.follow)

    def follow(self, sequence: Sequence, draft: Draft) -> Draft:
        followed = follow(sequence, draft)
        self.num_cut += len(draft) - len(followed)
        return followed


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Cuts:
    return Cuts(monkeypatch)


def of(expected: Answers, asked: list[EngineRequest]) -> Answers:
    return {(each.request_id, choice): expected[each.request_id, choice] for each in asked for choice in range(each.sampling.n)}


class TestGrammars:
    def test_same_answers(self, model: Model, expected: Answers, reader: Reader, cuts: Cuts) -> None:
        asked = constrained(model)
        answers = run(model.engine(reader), *asked)
        assert answers == of(expected, asked)
        assert cuts.num_cut > 0
        num_accepted = sum(answer.num_accepted for answer in answers.values())
        assert num_accepted > 100 if reader.right or reader.branches else num_accepted == 0
        some_were_wrong = num_accepted < sum(answer.num_drafted for answer in answers.values())
        assert some_were_wrong == (reader.branches or reader.right < 1.0)

    @pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 7}, {"num_blocks": 18}])
    def test_same_answers_in_small_steps_and_small_pools(
        self, model: Model, expected: Answers, reader: Reader, settings: dict[str, object]
    ) -> None:
        asked = constrained(model)
        engine = model.engine(reader, **settings)
        assert run(engine, *asked) == of(expected, asked)
        assert engine.stats().num_preemptions > 0 or "num_blocks" not in settings

    def test_same_answers_behind_a_hand_off(self, model: Model, expected: Answers, reader: Reader) -> None:
        asked = constrained(model)
        answers = run_apart(model.engine(), model.engine(reader), *asked)
        assert answers == of(expected, asked)
        if reader.right == 1.0:
            assert sum(answer.num_accepted for answer in answers.values()) > 100

    def test_same_answers_behind_a_history(self, model: Model, expected: Answers, reader: Reader) -> None:
        """In the middle of forced runs, too."""
        [each] = [each for each in requests(model) if each.request_id == "a"]
        whole, engine = expected["a", 0].token_ids, model.engine(reader)
        for length in range(1, len(whole), 5):
            [answer] = run(engine, replace(each, emitted=(tuple(whole[:length]),))).values()
            assert [*whole[:length], *answer.token_ids] == whole

    @pytest.mark.parametrize("logprobs", [None, 1])
    @pytest.mark.parametrize("length", range(1, 6))
    def test_a_dead_end_behind_kept_tokens_is_none_the_less_one(self, model: Model, length: int, logprobs: int | None) -> None:
        """What came out is not whole, wherever the guess said that it ends."""
        source = f"start: X Y\nX: /[xy]{{{length}}}z/\nY: /a+/ & /b+/"
        each = model.request("x", "grammar", source, logprobs=logprobs)
        plain = run(model.engine(), each)
        guessed = run(model.engine(Reader(plain, 1.0)), each)
        assert guessed == plain
        assert plain["x", 0].finish_reason is FinishReason.LENGTH

    def test_what_is_allowed_behind_a_token_is_found_once(
        self, model: Model, expected: Answers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For the draft, and for the draw."""
        num_found, original = 0, GrammarMatcher._find_allowed

        def counted(matcher: GrammarMatcher) -> Bits:
            nonlocal num_found
            num_found += 1
            return original(matcher)

        monkeypatch.setattr(GrammarMatcher, "_find_allowed", counted)
        each = with_logprobs(model.request("a"))
        answer = run(model.engine(Reader(expected, 0.8)), each)["a told", 0]
        assert answer.num_accepted > 10
        assert num_found == answer.num_steps + answer.num_drafted


class TestDraws:
    def test_same_answers(self, model: Model, expected: Answers, reader: Reader) -> None:
        asked = free(model)
        answers = run(model.engine(reader), *asked)
        assert answers == of(expected, asked)
        for answer in answers.values():
            assert answer.num_accepted > 5 if reader.right == 1.0 else answer.num_accepted < answer.num_drafted

    def test_kept_tokens_and_steps_are_all_the_tokens(self, model: Model, expected: Answers, reader: Reader) -> None:
        for answer in run(model.engine(reader), *free(model)).values():
            if answer.finish_reason is FinishReason.LENGTH:
                assert answer.num_steps + answer.num_accepted == len(answer.token_ids)

    def test_a_stop_token_inside_what_was_kept(self, model: Model) -> None:
        each = unconstrained(model, "stopped", logprobs=2)
        whole = run(model.engine(), each)
        truth, num_inside = whole["stopped", 0].token_ids, 0
        for stop in dict.fromkeys(truth):
            asked = replace(each, sampling=replace(each.sampling, stop_token_ids=(stop,)))
            reader = Reader(whole, 1.0)
            answer = run(model.engine(reader), asked)["stopped", 0]
            assert answer == run(model.engine(), asked)["stopped", 0]
            assert answer.token_ids == truth[: truth.index(stop) + 1]
            assert answer.finish_reason is FinishReason.STOP
            last = reader.learned[-1]
            num_before = sum(len(verified.new_tokens) for verified in reader.learned[:-1])
            is_guess = len(answer.token_ids) - num_before <= len(last.kept)
            assert answer.num_accepted == len(answer.token_ids) - answer.num_steps + is_guess
            num_inside += len(answer.token_ids) - num_before < len(last.kept)
        assert num_inside > 0

    def test_an_end_token_inside_what_was_kept(self, model: Model, expected: Answers) -> None:
        """Everything of an answer but its first token may be guessed, its end included."""
        reader = Reader(expected, 1.0)
        answers = run(model.engine(reader), *map(with_logprobs, requests(model)[:3]))
        ends = [answer for answer in answers.values() if answer.token_ids[-1] == IM_END]
        assert len(ends) == 5
        num_ended_by_a_guess = sum(a.num_steps + a.num_accepted - len(a.token_ids) for a in ends)
        assert 0 < num_ended_by_a_guess <= len(ends)

    @pytest.mark.parametrize("branches", [False, True])
    def test_no_token_more_than_were_asked_for(self, model: Model, branches: bool) -> None:
        each = unconstrained(model, "short", max_tokens=14)
        whole, num_accepted = run(model.engine(), each), 0
        truth = whole["short", 0].token_ids
        for max_tokens in range(1, len(truth)):
            asked = replace(each, sampling=replace(each.sampling, max_tokens=max_tokens))
            answer = run(model.engine(Reader(whole, 1.0, branches=branches)), asked)["short", 0]
            assert tokens({("short", 0): answer}) == {("short", 0): (truth[:max_tokens], FinishReason.LENGTH)}
            assert answer.num_steps + answer.num_accepted == max_tokens
            num_accepted += answer.num_accepted
        assert num_accepted > 0
