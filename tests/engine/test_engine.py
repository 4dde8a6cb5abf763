"""The engine on the mock model: whatever the batch, budget and pool, the oracle's tokens; then every block is free again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.engine.errors import InvalidState, UnknownRequest
from pdmesh.engine.outputs import FinishReason
from tests.support.engine_requests import PROMPT, assert_answers, assert_whole, request
from tests.support.mock_engine import Collector, answer, make_engine, run_to_end


class TestAdd:
    def test_one_request(self) -> None:
        engine = make_engine()
        assert engine.add(request())
        assert engine.has_work
        collector = run_to_end(engine)
        assert_answers(collector, request())
        assert collector.started == ["r"]
        assert not engine.has_work
        assert_whole(engine)

    def test_eos_ends_it_and_is_included(self) -> None:
        engine = make_engine()
        requests = [request(str(i), PROMPT[: i + 1], max_tokens=30, temperature=1.0, ignore_eos=False) for i in range(8)]
        assert all(map(engine.add, requests))
        collector = run_to_end(engine)
        assert_answers(collector, *requests)
        assert FinishReason.STOP in {collector.answer(each.request_id).finish_reason for each in requests}

    def test_the_context_ends_it(self) -> None:
        engine = make_engine(max_context=14)
        assert engine.add(request(max_tokens=50))
        got = run_to_end(engine).answer("r")
        assert got == answer(request(max_tokens=50), 0, max_context=14)
        assert len(got.token_ids) == 4

    @pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
    @pytest.mark.parametrize("num_blocks", [5, 7, 16])
    def test_any_budget_and_pool_give_the_same_tokens(self, budget: int, num_blocks: int) -> None:
        engine = make_engine(num_blocks=num_blocks, max_num_batched_tokens=budget)
        requests = [request(str(i), PROMPT[: 3 + 2 * i], max_tokens=9) for i in range(4)]
        assert all(map(engine.add, requests))
        assert_answers(run_to_end(engine), *requests)
        assert_whole(engine)

    def test_preemption_happens_and_shows_in_no_token(self) -> None:
        engine = make_engine(num_blocks=6)
        requests = [request(str(i), (i, *PROMPT[:4]), max_tokens=12) for i in range(3)]
        assert all(map(engine.add, requests))
        assert_answers(run_to_end(engine), *requests)
        assert engine.stats().num_preemptions > 0
        assert_whole(engine)

    def test_a_repeated_prompt_hits_the_cache(self) -> None:
        engine = make_engine()
        engine.add(request("a"))
        run_to_end(engine)
        engine.add(request("b"))
        result = engine.step()
        assert result is not None
        timing = result.started[0].timing
        assert timing is not None
        assert (timing.num_cached_tokens, timing.num_computed_tokens, timing.num_steps) == (8, 2, 1)
        assert engine.stats().num_prefix_hit_tokens == 8
        collector = Collector()
        collector.take(result)
        assert run_to_end(engine, collector).answer("b") == answer(request("b"), 0)

    def test_another_cache_root_does_not(self) -> None:
        engine = make_engine()
        engine.add(request("a"))
        run_to_end(engine)
        engine.add(replace(request("b"), cache_root=b"another tenant"))
        run_to_end(engine)
        assert engine.stats().num_prefix_hit_tokens == 0

    def test_no_prefix_caching_means_none(self) -> None:
        engine = make_engine(prefix_caching=False)
        for name in "ab":
            engine.add(request(name))
            assert_answers(run_to_end(engine), request(name))
        assert (engine.stats().num_prefix_hit_tokens, engine.stats().num_cached_blocks) == (0, 0)

    def test_history_is_forced_and_not_repeated(self) -> None:
        engine = make_engine()
        forced = request(emitted=((1, 2, 1),), max_tokens=7)
        engine.add(forced)
        collector = run_to_end(engine)
        assert_answers(collector, forced)
        assert collector.choices["r", 0].first_index == 3

    def test_seats(self) -> None:
        engine = make_engine(max_num_seqs=3)
        assert engine.add(request("a", n=2))
        assert not engine.add(request("b", n=2))
        assert engine.reserve(request("b", n=2)) is None
        assert engine.add(request("b"))
        assert engine.release("a")
        assert engine.add(request("c", n=2))


class TestChoices:
    @pytest.mark.parametrize("num_blocks", [5, 8, 32])
    def test_each_choice_has_its_own_noise_on_one_prefill(self, num_blocks: int) -> None:
        engine = make_engine(num_blocks=num_blocks)
        three = request(n=3, temperature=1.5, max_tokens=8)
        engine.add(three)
        collector = run_to_end(engine)
        assert_answers(collector, three)
        assert len({collector.answer("r", choice).token_ids for choice in range(3)}) > 1
        assert collector.started == ["r"]
        assert_whole(engine)
        if num_blocks == 32:
            assert engine.stats().num_prefilled_tokens == len(PROMPT)

    def test_with_history_each_goes_on_behind_its_own(self) -> None:
        engine = make_engine()
        resumed = request(n=3, temperature=1.5, emitted=((1, 2, 4, 5, 6), (), (7,)), max_tokens=8)
        engine.add(resumed)
        assert_answers(run_to_end(engine), resumed)
        assert_whole(engine)

    def test_when_all_have_history_the_prompt_draws_nothing(self) -> None:
        engine = make_engine()
        resumed = request(n=2, temperature=1.5, emitted=((1, 2, 4, 5, 6), (7,)), max_tokens=8)
        engine.add(resumed)
        assert_answers(run_to_end(engine), resumed)

    def test_finished_choices_are_not_continued(self) -> None:
        engine = make_engine(max_num_seqs=2)
        resumed = request(n=3, temperature=1.5, emitted=((1,), (2, 4), (7,)), finished=(False, True, False))
        engine.add(resumed)
        collector = run_to_end(engine)
        assert_answers(collector, resumed)
        assert ("r", 1) not in collector.choices


class TestPrefillOnly:
    def test_holds_its_blocks_until_release_and_publishes_the_full_ones(self) -> None:
        engine = make_engine()
        engine.add(request(prefill_only=True))
        collector = run_to_end(engine)
        assert collector.answer("r") == answer(request(), 0, max_new=1)
        assert engine.held_blocks("r") == (0, 1, 2)
        stats = engine.stats()
        assert (stats.num_held, stats.num_free_blocks, stats.num_cached_blocks, stats.num_running) == (1, 13, 2, 0)
        assert not engine.has_work
        assert engine.release("r")
        assert not engine.release("r")
        assert_whole(engine)

    def test_draws_a_first_token_for_each_choice(self) -> None:
        engine = make_engine()
        several = request(n=3, temperature=1.5, prefill_only=True)
        engine.add(several)
        result = engine.step()
        assert result is not None
        assert [(update.choice, update.index) for update in result.updates] == [(0, 0), (1, 0), (2, 0)]
        expected = [answer(several, choice, max_new=1).token_ids for choice in range(3)]
        assert [update.token_ids for update in result.updates] == expected
        assert len(engine.held_blocks("r")) == 3

    def test_draws_behind_history(self) -> None:
        engine = make_engine()
        engine.add(request(emitted=((1, 2, 4),), prefill_only=True))
        result = engine.step()
        assert result is not None
        assert result.updates[0].index == 3
        assert len(engine.held_blocks("r")) == 4

    def test_says_when_the_first_token_ends_a_choice_and_still_holds(self) -> None:
        engine = make_engine()
        engine.add(request(max_tokens=1, prefill_only=True))
        assert run_to_end(engine).answer("r").finish_reason is FinishReason.LENGTH
        assert engine.held_blocks("r")

    def test_held_blocks_of_others_are_errors(self) -> None:
        engine = make_engine()
        engine.add(request())
        with pytest.raises(InvalidState):
            engine.held_blocks("r")
        with pytest.raises(UnknownRequest, match="'other' is not in the engine"):
            engine.held_blocks("other")

    def test_needs_blocks_for_the_prompt_only(self) -> None:
        engine = make_engine(num_blocks=3)
        assert engine.add(request(max_tokens=40, prefill_only=True))
        assert run_to_end(engine).answer("r").finish_reason is None
