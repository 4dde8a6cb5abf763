"""Whoever guesses, and however wrongly: the tokens are those of the oracle, in fewer steps where the guesses were right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.engine.engine import Engine
from tests.support.engine_requests import PROMPT, assert_answers, assert_whole, behind, push, request
from tests.support.guesser import Guesser
from tests.support.mock_engine import answer, make_engine, run_to_end

LENGTH = 5


def engine_with(guesser: Guesser, *, num_blocks: int = 16, max_num_batched_tokens: int = 64) -> Engine:
    return make_engine(
        proposers=[guesser],
        draft_length=0 if guesser.branches else LENGTH,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
    )


GUESSERS = {
    "right": Guesser(1.0),
    "wrong": Guesser(0.0),
    "half": Guesser(0.5),
    "right tree": Guesser(1.0, branches=True),
    "wrong first": Guesser(0.0, branches=True),
    "half tree": Guesser(0.5, branches=True),
}


@pytest.fixture(params=GUESSERS)
def guesser(request: pytest.FixtureRequest) -> Guesser:
    known: Guesser = GUESSERS[request.param]
    return Guesser(known.right, branches=known.branches)


class TestTokens:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("budget", [1, 4, 64])
    def test_same_tokens(self, guesser: Guesser, temperature: float, budget: int) -> None:
        engine = engine_with(guesser, max_num_batched_tokens=budget)
        requests = [request(str(i), PROMPT[: 3 + i], max_tokens=11, temperature=temperature) for i in range(4)]
        assert all(map(engine.add, requests))
        assert_answers(run_to_end(engine), *requests)
        assert_whole(engine)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_same_tokens_with_biases(self, guesser: Guesser, temperature: float) -> None:
        """A draft is accepted where the model draws it with its bias."""
        engine = engine_with(guesser)
        plain = [request(str(i), PROMPT[: 3 + i], max_tokens=11, temperature=temperature) for i in range(3)]
        liked = [(), ((answer(plain[1], 0).token_ids[1], -100.0),), ((20, 100.0), (21, 99.5))]
        requests = [
            replace(each, sampling=replace(each.sampling, logit_bias=bias)) for each, bias in zip(plain, liked, strict=True)
        ]
        assert answer(requests[1], 0) != answer(plain[1], 0) and set(answer(requests[2], 0).token_ids) <= {20, 21}
        assert all(map(engine.add, requests))
        assert_answers(run_to_end(engine), *requests)
        assert_whole(engine)

    def test_same_tokens_with_choices_history_and_ends(self, guesser: Guesser) -> None:
        engine = engine_with(guesser)
        requests = [
            request("n", max_tokens=9, n=3, temperature=1.0),
            request("h", max_tokens=9, emitted=((4, 5, 6),)),
            *(request(f"e{i}", PROMPT[: i + 1], max_tokens=25, temperature=1.0, ignore_eos=False) for i in range(3)),
        ]
        assert all(map(engine.add, requests))
        assert_answers(run_to_end(engine), *requests)
        assert_whole(engine)

    def test_same_tokens_behind_a_hand_off(self, guesser: Guesser) -> None:
        engine, each = engine_with(guesser), request(max_tokens=12)
        first_tokens = push(engine, each)
        engine.start(each.request_id, first_tokens)
        assert_answers(run_to_end(engine), behind(each, first_tokens))
        assert_whole(engine)

    def test_same_tokens_when_blocks_are_short(self, guesser: Guesser) -> None:
        engine = engine_with(guesser, num_blocks=6)
        requests = [request(str(i), (i, *PROMPT[:4]), max_tokens=12) for i in range(3)]
        assert all(map(engine.add, requests))
        assert_answers(run_to_end(engine), *requests)
        assert engine.stats().num_preemptions
        assert_whole(engine)

    def test_penalties_and_logprobs(self, guesser: Guesser) -> None:
        engine, plain = engine_with(guesser), make_engine()
        each = request(max_tokens=14)
        each = replace(each, sampling=replace(each.sampling, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2))
        updates = []
        for one in (engine, plain):
            assert one.add(each)
            told = []
            while (result := one.step()) is not None:
                told += [
                    (update.index + place, token, update.logprobs[place])
                    for update in result.updates
                    for place, token in enumerate(update.token_ids)
                ]
            updates.append(told)
        assert updates[0] == updates[1]


class TestSteps:
    def test_right_guesses_save_steps(self) -> None:
        def num_steps(engine: Engine) -> int:
            engine.add(request(max_tokens=40))
            run_to_end(engine)
            return engine.stats().num_steps

        assert num_steps(engine_with(Guesser(1.0))) < 0.6 * num_steps(make_engine())
        assert num_steps(engine_with(Guesser(0.0))) == num_steps(make_engine())

    def test_what_was_kept_can_be_shared(self) -> None:
        engine = engine_with(Guesser(1.0))
        first = request("a", max_tokens=20)
        engine.add(first)
        answer = run_to_end(engine).answer("a").token_ids
        again = request("b", (*PROMPT, *answer, 4), max_tokens=4)
        engine.add(again)
        assert_answers(run_to_end(engine), again)
        assert engine.stats().num_prefix_hit_tokens >= 4 * ((len(PROMPT) + len(answer) - 1) // 4)

    def test_hidden_states_come_with_the_last_token(self) -> None:
        guesser = Guesser(0.5, wants_hidden=True)
        engine = engine_with(guesser)
        engine.add(request(max_tokens=20))
        run_to_end(engine)
        positions = [len(PROMPT) - 1]
        for verified in guesser.learned[1:]:
            positions.append(positions[-1] + len(verified.new_tokens))
        assert guesser.hidden == positions

    def test_a_draft_preempts_nobody(self) -> None:
        for guesser in (None, Guesser(0.0)):
            engine = make_engine(num_blocks=8, proposers=[guesser] if guesser else (), draft_length=LENGTH)
            for i in range(2):
                engine.add(request(str(i), (i, *PROMPT[:4]), max_tokens=8))
            run_to_end(engine)
            assert not engine.stats().num_preemptions

    def test_a_branch_that_was_not_the_first_is_kept(self) -> None:
        guesser = Guesser(0.0, branches=True)
        engine = engine_with(guesser)
        each = request(max_tokens=40)
        engine.add(each)
        assert_answers(run_to_end(engine), each)
        assert any(node != place for verified in guesser.learned for place, node in enumerate(verified.kept))
