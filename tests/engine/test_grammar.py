"""Constrained requests through the engine: whole outputs, and the same ones however they were computed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import jsonschema
import pytest

from pdmesh.engine.errors import InvalidRequest
from pdmesh.engine.outputs import FinishReason
from pdmesh.engine.sampling.grammar import Bits, Grammar, Matcher
from pdmesh.text.grammar import GrammarCompiler, GrammarMatcher
from tests.engine.backends import BACKENDS
from tests.engine.constrained import SCHEMA, Answer, Answers, Model, collect, requests, run, run_apart, tokens
from tests.support.tiny_models import IM_END, VOCAB_SIZE


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.make(tmp_path_factory.mktemp("grammar"), request.param)


@pytest.fixture(scope="module")
def expected(model: Model) -> Answers:
    """Each alone, in an engine of its own."""
    answers: Answers = {}
    for each in requests(model):
        answers.update(run(model.engine(prefix_caching=False), each))
    return answers


def test_outputs_are_whole_or_cut_at_max_tokens(model: Model, expected: Answers) -> None:
    for name, choice in (("a", 0), ("b", 0), ("c", 0), ("c", 1), ("c", 2)):
        answer = expected[name, choice]
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids[-1] == IM_END
        jsonschema.validate(json.loads(model.text(answer)), SCHEMA)
    assert model.text(expected["e", 0]) == "forced from the beginning to its end"
    assert expected["f", 0].finish_reason is FinishReason.LENGTH
    assert len(expected["f", 0].token_ids) == 17
    assert len({model.text(expected["c", choice]) for choice in range(3)}) == 3


def test_forced_tokens_skip_the_model(model: Model) -> None:
    engine = model.engine()
    answer = run(engine, model.request("e", "regex", "forced from the beginning to its end"))["e", 0]
    assert engine.stats().num_steps == 1
    assert engine.stats().num_generated_tokens == len(answer.token_ids) == 37
    engine = model.engine()
    answer = run(engine, model.request("a"))["a", 0]
    assert engine.stats().num_steps < len(answer.token_ids) // 2


def test_with_logprobs_each_token_is_computed_and_the_same(model: Model, expected: Answers) -> None:
    for each in requests(model):
        engine = model.engine()
        asked = replace(each, sampling=replace(each.sampling, logprobs=2))
        answers = run(engine, asked)
        for choice in range(each.sampling.n):
            answer = answers[each.request_id, choice]
            assert answer.token_ids == expected[each.request_id, choice].token_ids
            assert [entry.chosen[0] for entry in answer.logprobs] == answer.token_ids
        assert engine.stats().num_steps >= max(len(answer.token_ids) for answer in answers.values())


@pytest.mark.parametrize("budget", [7, 512])
def test_batched(model: Model, expected: Answers, budget: int) -> None:
    engine = model.engine(max_num_batched_tokens=budget)
    assert tokens(run(engine, *requests(model))) == tokens(expected)
    assert tokens(run(engine, *reversed(requests(model)))) == tokens(expected)
    assert engine.stats().num_prefix_hit_tokens > 0


def test_preempted(model: Model, expected: Answers) -> None:
    engine = model.engine(num_blocks=16)
    assert tokens(run(engine, *requests(model))) == tokens(expected)
    assert engine.stats().num_preemptions > 0


def test_resumed_behind_every_history(model: Model, expected: Answers) -> None:
    """In the middle of forced runs, too."""
    engine = model.engine()
    for each in requests(model):
        if each.sampling.n > 1:
            continue
        whole = expected[each.request_id, 0]
        for length in range(1, len(whole.token_ids)):
            history = tuple(whole.token_ids[:length])
            [answer] = run(engine, replace(each, emitted=(history,))).values()
            assert [*history, *answer.token_ids] == whole.token_ids
            assert answer.finish_reason == whole.finish_reason


class Unreplayed:
    """A grammar of which nobody may ask for a beginning."""

    def __init__(self, grammar: Grammar) -> None:
        self.vocab_size = grammar.vocab_size

    def matcher(self) -> Matcher:
        raise AssertionError("the engine begins at the beginning")

    def first_stray(self, output: Sequence[int]) -> int | None:
        raise AssertionError("the engine replays the history")


def test_a_history_that_was_replayed_elsewhere_is_not_replayed_again(model: Model, expected: Answers) -> None:
    engine = model.engine(num_blocks=16)
    for name in ("a", "c"):
        [each] = [each for each in requests(model) if each.request_id == name]
        grammar = model.grammars.compile("json_schema", json.dumps(SCHEMA))
        histories = tuple(tuple(expected[name, choice].token_ids[: 5 + 6 * choice]) for choice in range(each.sampling.n))
        matchers = tuple(grammar.follow(history)[0] for history in histories)
        asked = replace(each, emitted=histories, grammar=Unreplayed(grammar), matchers=matchers)
        for _ in range(2):  # a matcher serves more than once
            answers = run(engine, asked)
            for choice in range(each.sampling.n):
                assert [*histories[choice], *answers[name, choice].token_ids] == expected[name, choice].token_ids


def test_choices_that_have_not_parted_share_their_mask(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[int] = []
    original = GrammarMatcher.allowed

    def counted(matcher: GrammarMatcher) -> Bits:
        masks.append(id(matcher))
        return original(matcher)

    monkeypatch.setattr(GrammarMatcher, "allowed", counted)
    each = model.request("c", "regex", "[a-z]{1,9}", n=5, max_tokens=1)
    answers = run(model.engine(), each)
    assert len(masks) == 1 and len(answers) == 5


def test_forced_tokens_are_output_not_prompt(model: Model) -> None:
    engine = model.engine(prefix_caching=False)
    each = model.request("s", "regex", "[xy]forced and long[ab]and more of it[cd]")
    answer = run(engine, each)["s", 0]
    assert engine.stats().num_prefilled_tokens == len(each.prompt)
    assert engine.stats().num_generated_tokens == len(answer.token_ids) == 33
    engine.add(replace(each, request_id="t", emitted=(tuple(answer.token_ids[:4]),)))
    assert engine.stats().num_waiting_tokens == len(each.prompt) + 4
    engine.step()
    assert engine.stats().num_waiting_tokens == 0
    while engine.step() is not None:
        pass
    assert engine.stats().num_prefilled_tokens == 2 * len(each.prompt) + 4
    assert engine.stats().num_generated_tokens == 33 + 29


def test_resumed_choices_part_with_their_histories(model: Model, expected: Answers) -> None:
    [each] = [each for each in requests(model) if each.request_id == "c"]
    histories = tuple(tuple(expected["c", choice].token_ids[: 11 * choice]) for choice in range(3))
    answers = run(model.engine(), replace(each, emitted=histories))
    for choice in range(3):
        assert [*histories[choice], *answers["c", choice].token_ids] == expected["c", choice].token_ids


def test_prefilled_in_one_engine_and_decoded_in_another(model: Model, expected: Answers) -> None:
    answers = run_apart(model.engine(), model.engine(num_blocks=150), *requests(model))
    assert tokens(answers) == tokens(expected)


@pytest.mark.parametrize("regex", ["[xy]forced to its end", "[xy]forced[ab]and more", "[xy]"])
def test_what_is_forced_behind_a_first_token_from_elsewhere_costs_no_step_more(model: Model, regex: str) -> None:
    here, there, each = model.engine(), model.engine(), model.request("s", "regex", regex)
    whole = run(here, each)["s", 0]
    assert there.reserve(each) is not None  # what its blocks hold is of no matter: the grammar draws
    there.start("s", {0: whole.token_ids[0]})
    rest: Answers = defaultdict(Answer)
    while (result := there.step()) is not None:
        collect(rest, result)
    assert rest["s", 0].first_index == 1
    assert model.text(rest["s", 0])[: len("forced")] == model.text(whole)[1:][: len("forced")]
    assert rest["s", 0].finish_reason is FinishReason.STOP
    assert there.stats().num_steps <= max(1, here.stats().num_steps - 1)


def test_a_dead_end_ends_as_if_there_were_no_room(model: Model) -> None:
    answer = run(model.engine(), model.request("x", "grammar", 'start: "x" Y\nY: /a+/ & /b+/'))["x", 0]
    assert answer.finish_reason is FinishReason.LENGTH
    assert model.text(answer) == "x"


@pytest.mark.parametrize(
    ("changes", "sampling", "field"),
    [
        ({"emitted": ((ord("z"),),)}, {}, "emitted: token 0"),
        ({}, {"min_tokens": 3}, "sampling.min_tokens"),
        ({}, {"ignore_eos": True}, "sampling.ignore_eos"),
    ],
)
def test_contradictions_are_refused(model: Model, changes: dict[str, object], sampling: dict[str, object], field: str) -> None:
    asked = replace(model.request("a", **sampling), **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=field):
        model.engine().add(asked)


def test_a_grammar_of_another_vocabulary_is_refused(model: Model) -> None:
    grammar = GrammarCompiler(model.tokenizer.to_json(), VOCAB_SIZE + 32, {IM_END}).compile("regex", "a")
    with pytest.raises(InvalidRequest, match=r"sampling.constraint"):
        model.engine().add(replace(model.request("a"), grammar=grammar))
