"""When a late prompt is given to somebody else, and how often that may happen."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.v1 import mesh_pb2
from router.context import RouterContext
from router.fleet.worker import Dispatched
from router.lifecycle import placement, prefill_stage
from router.lifecycle.hedging import HedgeBudget, HedgeLimits, Hedging, PrefillTimes
from router.lifecycle.placement import predicted_s
from router.lifecycle.request import Dispatch, PrefillTarget
from router.routing.cost_model import Prediction
from router.routing.filters import Candidate, Placement
from tests.router.fleets import SPEED, worker
from tests.router.mesh import Answer, Mesh, expected, request, running_mesh
from tests.router.test_explain import mesh_that_tells
from tests.support.waiting import eventually


@given(st.lists(st.booleans(), max_size=400), st.floats(0.01, 0.5), st.integers(1, 8))
def test_hedges_are_a_share_of_the_requests(asks: list[bool], share: float, burst: int) -> None:
    budget, spent = HedgeBudget(HedgeLimits(share=share, burst=burst)), 0
    for earned, wants in enumerate(asks, 1):
        budget.earn()
        spent += wants and budget.spend()
        assert spent <= burst + share * earned + 1e-6


def test_no_share_no_hedge() -> None:
    hedging = Hedging(HedgeLimits(share=0.0))
    hedging.budget.earn()
    assert not hedging.may_hedge(100.0, 1.0, silent=True)
    assert not hedging.may_hedge(100.0, 1.0, silent=False)


@pytest.mark.parametrize(
    ("waited_s", "silent", "hedges"),
    [(0.1, True, False), (0.3, True, True), (0.3, False, False), (1.9, False, False), (2.0, False, True)],
)
def test_a_silent_worker_is_left_sooner_than_a_late_one(waited_s: float, silent: bool, hedges: bool) -> None:
    assert Hedging().may_hedge(waited_s, 2.0, silent=silent) is hedges


def test_a_silent_worker_costs_no_budget_a_late_one_does() -> None:
    hedging = Hedging(HedgeLimits(burst=1.0))
    assert all(hedging.may_hedge(5.0, 1.0, silent=True) for _ in range(10))
    assert [hedging.may_hedge(5.0, 1.0, silent=False) for _ in range(3)] == [True, False, False]


def test_the_bound_is_the_prediction_s_else_what_was_seen_else_long() -> None:
    hedging = Hedging(HedgeLimits(factor=3.0, margin_s=0.1, min_s=0.25, unknown_s=10.0))
    assert hedging.bound_s(100, None) == 10.0
    assert hedging.bound_s(100, 0.2) == pytest.approx(0.7)
    assert hedging.bound_s(100, 0.001) == 0.25
    for _ in range(4):
        hedging.times.record(100, 0.5)
    assert hedging.bound_s(100, None) == pytest.approx(1.6)
    assert hedging.bound_s(400, None) == pytest.approx(6.1)  # four times the length, four times the time
    assert hedging.bound_s(10, None) == pytest.approx(1.6)


def test_a_few_slow_ones_do_not_raise_the_bound_for_all() -> None:
    times = PrefillTimes()
    for number in range(40):
        times.record(64, 5.0 if number % 20 == 0 else 0.1)
    assert times.quantile(64, 0.9) == 0.1


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0.001, 10)), min_size=1, max_size=100), st.integers(1, 5000))
def test_a_longer_prompt_is_never_expected_sooner_for_its_length_alone(seen: list[tuple[int, float]], num_tokens: int) -> None:
    times = PrefillTimes()
    for length, _ in seen:
        times.record(length, 0.1 * length)  # so slow that time is proportional to length
    shorter, longer = times.quantile(num_tokens, 0.5), times.quantile(64 * num_tokens, 0.5)
    assert (shorter is None) == (longer is None)
    assert shorter is None or longer is None or longer >= 0.5 * shorter


@pytest.mark.parametrize(
    ("speed", "predicted", "expected_s"),
    [
        (SPEED, True, 0.2),
        (replace(SPEED, num_steps=0), True, None),  # a guess from the hardware
        (None, True, None),
        (SPEED, False, None),  # a policy that predicts nothing
    ],
)
def test_a_prompt_is_late_by_what_was_predicted_of_measured_workers(
    speed: LatencyModel | None, predicted: bool, expected_s: float | None
) -> None:
    prefill, decode = worker("p0", latency=speed), worker("d0")
    prediction = Prediction(0.4, 0.01, 0.0, 0.1, 0.0, 0.0, plain_ttft_s=0.2)
    local = Candidate(decode, None, 2.0, True, prediction._replace(ttft_s=0.9))
    remote = Candidate(decode, prefill, 1.0, True, prediction)
    assert predicted_s(Placement(decode, prefill, "", [local, remote] if predicted else [])) == expected_s
    assert predicted_s(Placement(decode, None, "", [local, remote])) is None


async def test_the_prediction_hedges_where_no_prompt_has_been_seen(model_folder: Path) -> None:
    async with running_mesh(model_folder, prefill=2, policy="predict") as mesh:
        core = (await mesh_that_tells(mesh)).router.core
        core.hedging.limits = HedgeLimits(min_s=0.1, unknown_s=1000.0)
        core.fleet.workers[mesh["p1"].address].dispatched(Dispatched(tokens=10_000))  # so that p0 is asked first
        mesh["p0"].prefill_plan = ["mute"]
        asked = request()
        asked.options.mode = mesh_pb2.PREFILL_MODE_REMOTE
        answer = await mesh.generate(asked)
        assert answer.tokens() == expected(8)
        assert (answer.timings.prefill_worker, core.num_hedges) == ("p1", 1)
        await mesh.until_whole()


@asynccontextmanager
async def late_on_a_busy_worker(model_folder: Path, num_tokens: int) -> AsyncIterator[tuple[Mesh, asyncio.Task[Answer]]]:
    """A prompt waits on p0, which reports that it computes so many tokens; p1 has 10 000 to compute."""
    async with running_mesh(model_folder, prefill=2, policy="predict") as mesh:
        core = (await mesh_that_tells(mesh)).router.core
        core.hedging.limits = HedgeLimits(min_s=0.1, factor=0.0, margin_s=0.0)
        mesh["p0"].num_waiting_tokens, mesh["p1"].num_waiting_tokens = 1000, 10_000
        await eventually(lambda: sum(view.num_waiting_tokens for view in core.fleet.views()) == 11_000)
        mesh["p0"].prefill_plan = ["mute"]
        asked = request()
        asked.options.mode = mesh_pb2.PREFILL_MODE_REMOTE
        answering = asyncio.create_task(mesh.generate(asked))
        await eventually(lambda: mesh["p0"].prefills)
        mesh["p0"].num_waiting_tokens = num_tokens
        yield mesh, answering
        assert (await answering).tokens() == expected(8)
        assert core.num_hedges == 1
        await mesh.until_whole()


async def test_a_late_prompt_stays_with_a_busy_worker_that_will_have_it_done_first(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[bool]()
    look = placement.is_sooner_elsewhere

    def counted(core: RouterContext, dispatch: Dispatch, prefill: PrefillTarget) -> bool:
        looks.append(look(core, dispatch, prefill))
        return looks[-1]

    monkeypatch.setattr(prefill_stage, "is_sooner_elsewhere", counted)
    monkeypatch.setattr(prefill_stage, "VERY_LATE", math.inf)
    monkeypatch.setattr(placement, "MOVING_PERIODS", math.inf)  # however busy this machine is
    async with late_on_a_busy_worker(model_folder, 1000) as (mesh, _):
        await eventually(lambda: len(looks) >= 3)
        assert mesh.router.core.num_hedges == 0 and not any(looks)
        mesh["p0"].num_waiting_tokens = 0  # it has no work, and the prompt has not come


async def test_a_late_prompt_leaves_a_busy_worker_where_another_has_it_done_first(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_stage, "VERY_LATE", math.inf)
    async with late_on_a_busy_worker(model_folder, 1_000_000):
        pass


async def test_a_very_late_prompt_leaves_any_worker(model_folder: Path) -> None:
    async with late_on_a_busy_worker(model_folder, 1000):
        pass
