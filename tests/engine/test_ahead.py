"""Steps that are launched before the tokens of the one before are seen: the oracle's tokens, whoever ends, comes or goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.support.ahead_model import AheadMock
from tests.support.mock_engine import Collector, answer, make_engine, run_to_end

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def request(name: str, *tokens: int, **changes: object) -> EngineRequest:
    return EngineRequest(name, tokens or (5, 6, 7), replace(GREEDY, **changes))  # type: ignore[arg-type]


def engine_of(model: AheadMock | None = None, **settings: int) -> tuple[Engine, AheadMock]:
    model = model or AheadMock()
    return make_engine(model=model, **{"num_blocks": 32, **settings}), model  # type: ignore[arg-type]


def check(collector: Collector, *requests: EngineRequest) -> None:
    for each in requests:
        for choice in range(each.sampling.n):
            assert collector.answer(each.request_id, choice) == answer(each, choice), each.request_id


def test_all_but_the_first_decode_step_are_launched_unseen() -> None:
    engine, model = engine_of()
    requests = [request("a"), request("b", 9, 8), request("c", *range(4, 20), temperature=1.0, seed=3)]
    for each in requests:
        engine.add(each)
    check(run_to_end(engine), *requests)
    # One step for the prompts, and the eleven behind it; none behind the last.
    assert (model.num_forwards, model.num_unseen) == (12, 11)
    assert engine.stats().num_steps == 12


def test_off() -> None:
    engine, model = engine_of(steps_ahead=False)
    engine.add(request("a"))
    check(run_to_end(engine), request("a"))
    assert model.num_unseen == 0


def test_who_ends_by_a_token_is_computed_once_more_for_nobody() -> None:
    """Stop tokens end some of these early; the others' tokens are none the wiser."""
    requests = [request(f"r{seed}", temperature=1.0, seed=seed, max_tokens=40, stop_token_ids=(9, 10)) for seed in range(5)]
    lengths = {len(answer(each, 0).token_ids) for each in requests}
    assert len(lengths) > 2
    assert max(lengths) < 40
    engine, model = engine_of()
    for each in requests:
        engine.add(each)
    check(run_to_end(engine), *requests)
    assert model.num_unseen > max(lengths) / 2
    assert engine.stats().num_free_blocks == 32


def test_who_is_released_meanwhile_and_who_comes() -> None:
    engine, model = engine_of()
    stays, goes, comes = request("stays"), request("goes", 8, 8), request("comes", *range(4, 13))
    collector = Collector()
    engine.add(stays)
    engine.add(goes)
    for _ in range(4):
        collector.take(engine.step())
    assert model.num_unseen == 4
    assert engine.release("goes")
    engine.add(comes)
    collector.take(engine.step())  # of the step that was under way
    assert "comes" not in collector.started
    collector.take(engine.step())  # the scheduler was asked for this one
    assert "comes" in collector.started
    check(run_to_end(engine, collector), stays, comes)
    assert collector.answer("goes").token_ids == answer(goes, 0).token_ids[:4]
    assert engine.stats().num_free_blocks == 32


def test_all_that_ran_are_released_under_a_step() -> None:
    engine, _ = engine_of()
    engine.add(request("goes"))
    for _ in range(3):
        engine.step()
    assert engine.release("goes")
    assert engine.step() is None
    engine.add(request("comes", 4, 4))
    check(run_to_end(engine), request("comes", 4, 4))


@pytest.mark.parametrize(
    ("changes", "num_unseen"),
    [
        ({"logprobs": 2}, 11),
        ({"repetition_penalty": 1.7}, 11),
        # These begin behind the first token, which is seen before they do.
        ({"presence_penalty": 1.5, "temperature": 1.0, "seed": 4}, 10),
        ({"frequency_penalty": 1.5}, 10),
    ],
)
def test_what_was_drawn_unseen_counts(changes: dict[str, object], num_unseen: int) -> None:
    engine, model = engine_of()
    requests = [request("a"), request("b", 9, 8, **changes)]
    for each in requests:
        engine.add(each)
    check(run_to_end(engine), *requests)
    assert model.num_unseen == num_unseen
    assert "logprobs" in changes or answer(requests[1], 0) != answer(request("b", 9, 8), 0)


def test_prompts_in_the_middle_are_the_schedulers() -> None:
    """Behind their last tokens the next step is launched at once."""
    engine, model = engine_of(max_num_batched_tokens=8)
    requests = [request("a"), request("b", *range(4, 24))]
    for each in requests:
        engine.add(each)
    collector = Collector()
    for _ in range(3):
        assert model.num_unseen == 0
        collector.take(engine.step())
    check(run_to_end(engine, collector), *requests)
    assert model.num_unseen == engine.stats().num_steps - 3 - 1


def test_who_waits_for_blocks_keeps_nobody_from_going_ahead() -> None:
    """He is refused as long as everybody stays, and comes in the step behind the one in which somebody left."""
    engine, model = engine_of(num_blocks=6)
    runs, waits = request("runs", max_tokens=9), request("waits", *range(4, 24), max_tokens=3)
    collector = Collector()
    engine.add(runs)
    engine.add(waits)
    for _ in range(9):
        assert "waits" not in collector.started
        collector.take(engine.step())
    assert model.num_unseen == 8
    collector.take(engine.step())
    assert "waits" in collector.started
    check(run_to_end(engine, collector), runs, waits)
    assert engine.stats().num_preemptions == 0


def test_who_waits_comes_when_blocks_come_free() -> None:
    """Somebody is released, or ends with a token that nobody saw coming."""
    engine, model = engine_of(num_blocks=7)
    stays, goes, waits = request("stays", max_tokens=10), request("goes", *range(4, 10)), request("waits", *range(4, 20))
    collector = Collector()
    for each in (stays, goes, waits):
        engine.add(each)
    for _ in range(3):
        collector.take(engine.step())
    assert (model.num_unseen, "waits" in collector.started) == (3, False)
    assert engine.release("goes")
    for _ in range(2):  # the step that was under way, and the scheduler's
        collector.take(engine.step())
    assert "waits" in collector.started
    check(run_to_end(engine, collector), stays, waits)


def test_steps_too_wide_for_the_model_are_run_as_ever() -> None:
    engine, model = engine_of(AheadMock(max_rows=2))
    requests = [request(f"r{index}", 5 + index) for index in range(3)]
    for each in requests:
        engine.add(each)
    check(run_to_end(engine), *requests)
    assert model.num_unseen == 0


def test_choices_go_ahead_once_they_have_parted() -> None:
    engine, model = engine_of()
    three = request("r", 5, 6, 7, 8, 9, n=3, temperature=1.0)
    engine.add(three)
    check(run_to_end(engine), three)
    assert model.num_unseen > 5


@pytest.mark.parametrize(("num_blocks", "num_ahead"), [(4, 0), (5, 0), (6, 1), (7, 1)])
def test_a_step_ahead_leaves_a_block_for_each_of_its_sequences(num_blocks: int, num_ahead: int) -> None:
    """Two hold a block and need another one for the step ahead: the scheduler's own step behind it may want one more each."""
    engine, model = engine_of(num_blocks=num_blocks)
    requests = [request("a", 5, 6, 7, 8), request("b", 8, 9, 10, 11)]
    for each in requests:
        engine.add(each)
    engine.step()
    assert (engine.stats().num_running, model.num_unseen) == (2, num_ahead)


def test_a_pool_without_room_is_left_to_the_scheduler() -> None:
    """Blocks of a step ahead are nobody's before the scheduler's own: sequences are preempted as without it."""
    engine, model = engine_of(num_blocks=9)
    requests = [request(f"r{index}", *range(4, 9 + index)) for index in range(4)]
    for each in requests:
        engine.add(each)
    check(run_to_end(engine), *requests)
    assert engine.stats().num_preemptions > 0
    assert model.num_unseen > 0
    assert engine.stats().num_free_blocks == 9
