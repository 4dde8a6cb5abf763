"""Whether a pull is worth it, and what is learned from those that were made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from pdmesh.v1 import prefill_pb2
from prefill_service.kv_pull import (
    ASSUMED_BYTES_PER_S,
    FIXED_S,
    FORGOTTEN_S,
    LEAST_LIMIT_S,
    LEFT_OUT_S,
    MAX_HOLDERS,
    MOST_LEFT_OUT_S,
    RETRY_S,
    Decision,
    Holder,
    KVPuller,
    Offer,
    PullTools,
)
from tests.support.waiting import eventually

MB = 1 << 20
SLOW = 10e6


@pytest.mark.parametrize(
    ("pull_s", "saved_s", "is_worth", "limit_s"),
    [
        (0.010, 0.100, True, LEAST_LIMIT_S),
        (0.100, 1.000, True, 0.300),  # three times what it should take
        (0.700, 1.000, True, 1.000),  # but no longer than the computation
        (0.090, 0.100, False, LEAST_LIMIT_S),
        (0.004, 0.000, False, LEAST_LIMIT_S),
    ],
)
def test_a_pull_is_worth_a_computation_that_takes_longer(pull_s: float, saved_s: float, is_worth: bool, limit_s: float) -> None:
    decision = Decision(pull_s, saved_s)
    assert decision.is_worth is is_worth
    assert decision.limit_s == pytest.approx(limit_s)


def test_small_pulls_say_nothing_about_the_rate() -> None:
    holder = Holder()
    for number in range(20):
        holder.came(MB // 2, 0.012, float(number))
    assert holder.bytes_per_s(20.0) == ASSUMED_BYTES_PER_S


def test_a_rate_is_learned_and_forgotten() -> None:
    holder = Holder()
    for _ in range(20):
        holder.came(round(100 * SLOW), 100 + FIXED_S, 0.0)
    assert holder.bytes_per_s(0.0) == pytest.approx(SLOW, rel=0.1)
    assert holder.bytes_per_s(FORGOTTEN_S) == pytest.approx(ASSUMED_BYTES_PER_S * 0.64, rel=0.05)
    assert holder.bytes_per_s(20 * FORGOTTEN_S) == pytest.approx(ASSUMED_BYTES_PER_S)


def test_a_link_that_is_too_slow_is_learned_from_a_pull_that_was_given_up() -> None:
    holder = Holder()
    holder.failed(grpc.StatusCode.DEADLINE_EXCEEDED, round(2 * SLOW), 2.0, 10.0)
    assert holder.bytes_per_s(10.0) == pytest.approx(SLOW)


@pytest.mark.parametrize(
    ("code", "left_out_s"),
    [
        (grpc.StatusCode.NOT_FOUND, [0.0, 0.0]),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [RETRY_S, RETRY_S]),
        (grpc.StatusCode.UNAVAILABLE, [LEFT_OUT_S, 2 * LEFT_OUT_S, 4 * LEFT_OUT_S]),
        (grpc.StatusCode.UNIMPLEMENTED, [MOST_LEFT_OUT_S]),
        (grpc.StatusCode.FAILED_PRECONDITION, [MOST_LEFT_OUT_S]),
    ],
)
def test_a_holder_is_left_out_by_how_it_failed(code: grpc.StatusCode, left_out_s: list[float]) -> None:
    holder = Holder()
    for seconds in left_out_s:
        holder.failed(code, MB, 0.01, 100.0)
        assert max(0.0, holder.not_before - 100.0) == pytest.approx(seconds)
    holder.came(MB, 0.01, 200.0)
    holder.failed(grpc.StatusCode.UNAVAILABLE, MB, 0.01, 200.0)
    assert holder.not_before - 200.0 == LEFT_OUT_S, "a success ends the row of failures"


def test_the_history_is_that_of_the_choice_that_goes_on() -> None:
    several = EngineRequest("r", (1, 2), SamplingParams(max_tokens=1, n=2), emitted=((3, 4, 5), (6,)), finished=(True, False))
    assert several.history == (1, 2, 6)
    assert EngineRequest("r", (1, 2), SamplingParams(max_tokens=1)).history == (1, 2)


async def test_what_was_not_used_for_long_is_forgotten_with_its_channel_unless_another_process_is_there() -> None:
    closed = list[str]()

    async def forget(address: str) -> None:
        closed.append(address)

    puller = KVPuller(cast("PullTools", SimpleNamespace(forget=forget)))
    holders = [("again", 1), ("again", 2), ("once", 1), *((f"later-{number}", 1) for number in range(MAX_HOLDERS - 1))]
    for address, epoch in holders:
        puller._known(prefill_pb2.KVHolder(address=address, epoch=epoch))
    await eventually(lambda: bool(closed))
    assert closed == ["again"], "when its last process was forgotten, not before"
    assert len(puller._holders) == MAX_HOLDERS


def holder_of(num_tokens: int, num_tier_tokens: int = 0, restore_token_s: float = 0.0) -> prefill_pb2.KVHolder:
    return prefill_pb2.KVHolder(
        address="h:1", epoch=1, num_tokens=num_tokens, num_tier_tokens=num_tier_tokens, restore_token_s=restore_token_s
    )


def test_a_holder_offers_what_its_pool_has_and_what_its_tiers_have_behind_that() -> None:
    assert Offer.of(holder_of(70), 16) == [Offer(64, 64)]
    assert Offer.of(holder_of(160, 96, 0.01), 16) == [Offer(64, 64), Offer(160, 64, 0.01)]
    assert Offer.of(holder_of(160, 160, 0.01), 16) == [Offer(160, 0, 0.01)]
    assert Offer.of(holder_of(15), 16) == Offer.of(holder_of(20, 15), 32) == []
    behind = Offer(160, 64, 0.01)
    assert (behind.restore_s(0), behind.restore_s(96), behind.restore_s(160)) == pytest.approx((0.96, 0.64, 0.0))


@pytest.mark.parametrize(
    ("restore_token_s", "chosen"),
    [(1e-5, 1600), (1e-3, 640), (0.5, 640)],
)
def test_the_offer_is_taken_that_saves_most(restore_token_s: float, chosen: int) -> None:
    """A token takes 0.5 ms to compute; what comes from a pool takes nearly nothing."""
    layout = SimpleNamespace(block_size=16)
    tools = SimpleNamespace(
        layout=layout, is_forced=False, bytes_per_token=100, compute_s=lambda first, last: (last - first) * 5e-4
    )
    puller = KVPuller(cast("PullTools", tools))
    offer = puller._best_offer(Holder(), holder_of(1600, 960, restore_token_s), 2000)
    assert offer is not None
    assert offer.num_tokens == chosen
    assert puller._best_offer(Holder(), holder_of(1600, 1600, 1e-3), 2000) is None
