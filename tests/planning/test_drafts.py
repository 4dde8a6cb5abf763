"""Capacity where workers draft tokens: never worse than without, and what the drafts bring where they pay."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.planning.capacity import DecodePool, SharedPool, bearable, fewest
from pdmesh.planning.capacity_load import Goals, Lengths, Limits, Load, Worker
from pdmesh.planning.latency_message import reported_drafts
from pdmesh.planning.latency_model import MAX_PER_ROW, NO_DRAFTS, Drafts, LatencyModel
from pdmesh.planning.prompt_times import decode_tokens_per_s, largest_batch, step_s, token_s
from pdmesh.v1 import worker_pb2

MODEL = LatencyModel(8e-3, 6e-5, 2e-9, 2e-4, 3e-8)
PLAIN = Worker(MODEL, Limits(2048, 256, 4_000_000))
LENGTHS = Lengths(1000, 2.0e6, 200)
CONTEXT = LENGTHS.running_context
DRAFTS = Drafts(1.5, 3.0)
DRAFTING = replace(PLAIN, drafts=DRAFTS)
GOALS = Goals(ttft_s=0.5, tpot_s=0.012, quantile=0.95)


def test_drafts_pay_while_a_row_is_cheap() -> None:
    """Beside few others two more rows cost less than half a step; beside many they do not."""
    few, many = (step_s(MODEL, batch, CONTEXT) for batch in (1, 256))
    assert DRAFTS.pay(MODEL, 1, few) and not DRAFTS.pay(MODEL, 256, many)
    assert DRAFTS.token_s(MODEL, 1, few) == pytest.approx((few + 2 * 2e-4) / 1.5)
    assert DRAFTS.token_s(MODEL, 256, many) == many
    assert not NO_DRAFTS.pay(MODEL, 1, few) and NO_DRAFTS.token_s(MODEL, 1, few) == few


@given(st.floats(1, 4), st.floats(1, 6), st.floats(0.004, 0.1))
def test_the_largest_batch_is_the_last_that_keeps_the_objective(tokens: float, computed: float, goal_s: float) -> None:
    worker, goals = replace(PLAIN, drafts=Drafts(tokens, max(tokens, computed))), Goals(tpot_s=goal_s)
    batches = np.arange(1.0, 257.0)
    times = token_s(worker, batches, CONTEXT)
    assert (np.diff(times) > 0).all(), "a fuller worker is never faster"
    assert (times <= token_s(PLAIN, batches, CONTEXT)).all(), "nobody drafts at a loss"
    kept = int((times <= goal_s).sum())
    found = largest_batch(worker, LENGTHS, goals)
    assert found == (kept or 256) or times[min(found, kept)] == pytest.approx(goal_s)  # nothing keeps it: all that fit


def test_one_batch_takes_what_many_take() -> None:
    drafts = DRAFTS
    for batch in (1.0, 7.0, 60.0, 200.0):
        one = token_s(DRAFTING, batch, CONTEXT)
        assert one == pytest.approx(drafts.token_s(MODEL, batch, step_s(MODEL, batch, CONTEXT)))
        assert one == token_s(DRAFTING, np.array([batch]), CONTEXT)[0]


def test_pools_whose_workers_draft_bear_more() -> None:
    load, good = Load(40.0, LENGTHS), replace(PLAIN, drafts=Drafts(2.0, 2.5))
    plain, drafting = fewest(DecodePool(PLAIN, GOALS), load, 999), fewest(DecodePool(good, GOALS), load, 999)
    assert plain is not None and drafting is not None and drafting < plain
    tokens = decode_tokens_per_s(good, LENGTHS, GOALS) / decode_tokens_per_s(PLAIN, LENGTHS, GOALS)
    assert plain / drafting == pytest.approx(tokens, rel=0.2)
    for worker in (PLAIN, replace(PLAIN, keeps_pace=False)):
        with_drafts = bearable(SharedPool(replace(worker, drafts=good.drafts), GOALS), load, 4)
        assert with_drafts > 1.02 * bearable(SharedPool(worker, GOALS), load, 4)


@pytest.mark.parametrize(
    ("tokens", "computed", "believed"),
    [
        (1.5, 3.0, DRAFTS),
        (0.0, 0.0, NO_DRAFTS),
        (math.nan, 2.0, NO_DRAFTS),
        (2.0, math.inf, NO_DRAFTS),
        (2.0, 1.5, NO_DRAFTS),
        (2.0, 2 * MAX_PER_ROW, NO_DRAFTS),
    ],
)
def test_a_report_is_believed_if_it_can_be(tokens: float, computed: float, believed: Drafts) -> None:
    report = worker_pb2.SpeculationReport(tokens_per_row=tokens, computed_per_row=computed)
    assert reported_drafts(worker_pb2.LoadReport(speculation=report)) == believed
    assert reported_drafts(worker_pb2.LoadReport()) == NO_DRAFTS
