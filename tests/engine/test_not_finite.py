"""Logits with NaN or infinity end their request with an error; all others get their tokens, and every block is free again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from pdmesh.engine.outputs import FinishReason, SequenceUpdate
from tests.support import mock_engine
from tests.support.engine_requests import PROMPT, assert_answers, assert_whole, request
from tests.support.mock_engine import make_engine, run_to_end

BROKEN = (2, *PROMPT[1:])
SOUND_LENGTH = len(BROKEN) + 3  # from here on the logits of a broken prompt are no numbers


@pytest.fixture(autouse=True, params=[float("nan"), float("inf")])
def broken_logits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mock_engine.mock_logits

    def logits(token_ids: Sequence[int]) -> Tensor:
        row = plain(token_ids).clone()
        if token_ids[0] == BROKEN[0] and len(token_ids) >= SOUND_LENGTH:
            row[7] = request.param
        return row

    monkeypatch.setattr(mock_engine, "mock_logits", logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_request_ends_alone_behind_its_tokens(temperature: float) -> None:
    engine = make_engine()
    others = [request(str(i), PROMPT[: 4 + i], max_tokens=12, temperature=temperature) for i in range(3)]
    broken = request("broken", BROKEN, max_tokens=12, temperature=temperature)
    assert all(map(engine.add, [others[0], broken, *others[1:]]))
    collector = run_to_end(engine)
    assert_answers(collector, *others)
    got = collector.answer("broken")
    assert (len(got.token_ids), got.finish_reason) == (3, FinishReason.ERROR)
    assert all(0 <= token < mock_engine.VOCAB_SIZE for token in got.token_ids)
    assert_whole(engine)


def test_no_other_prompt_finds_its_blocks() -> None:
    engine = make_engine()
    engine.watch_blocks(100)
    engine.add(request("broken", BROKEN, max_tokens=12))
    run_to_end(engine)
    assert engine.stats().num_cached_blocks == 0
    assert engine.published_blocks()[1] == ()
    changes = engine.take_block_changes()
    assert changes is not None and not changes.stored
    engine.add(request("again", BROKEN, max_tokens=2))
    run_to_end(engine)
    assert engine.stats().num_prefix_hit_tokens == 0


def test_tiers_are_told_to_forget_its_blocks() -> None:
    engine = make_engine()
    engine.sharing.watch_published(100)
    engine.add(request("broken", BROKEN, max_tokens=12))
    run_to_end(engine)
    withdrawn = engine.sharing.take_withdrawn()
    assert withdrawn and engine.sharing.take_published(100) == [] and engine.sharing.take_withdrawn() == []
    assert {name.root for name in withdrawn} == {request("broken", BROKEN).block_root}


def test_its_choices_end_each_at_its_place() -> None:
    engine = make_engine()
    engine.add(request("broken", BROKEN, n=3, temperature=1.0, max_tokens=9))
    collector = run_to_end(engine)
    assert {collector.answer("broken", choice).finish_reason for choice in range(3)} == {FinishReason.ERROR}
    assert_whole(engine)


def test_a_prefill_that_draws_nothing_says_so_and_is_held_until_its_release() -> None:
    engine = make_engine()
    engine.add(request("broken", (*BROKEN, 1, 1, 1), prefill_only=True))
    result = engine.step()
    assert result is not None
    [update] = result.updates
    assert (update.token_ids, update.finish_reason) == ((), FinishReason.ERROR)
    assert engine.release("broken")
    assert_whole(engine)


def test_log_probabilities_of_the_others_are_theirs() -> None:
    engine = make_engine()
    broken = request("broken", BROKEN, max_tokens=9)
    engine.add(replace(broken, sampling=replace(broken.sampling, logprobs=2)))
    updates: list[SequenceUpdate] = []
    while (result := engine.step()) is not None:
        updates += result.updates
    assert [len(update.token_ids) for update in updates] == [len(update.logprobs) for update in updates] == [1, 1, 1, 0]
    values = [value for update in updates for each in update.logprobs for _, value in each.top]
    assert len(values) == 6 and all(map(math.isfinite, values))
    assert_whole(engine)
