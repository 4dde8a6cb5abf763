"""What workers show after real requests: two engines, a hand-off between them, and their ports."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.hardware import ModelCost
from pdmesh.engine.outputs import EngineStats, StepWork
from pdmesh.engine.speculation.stats import Tally
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.metrics import Instrument
from pdmesh.v1 import prefill_pb2, worker_pb2
from pdmesh.worker import metrics
from pdmesh.worker.metrics import Seen, StepCounts, read
from tests.runtime.telemetry.scrape import Page, scrape
from tests.support.mini_router import MiniRouter
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, only_transport, running_worker, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(53)]
SHOWN = TelemetryConfig(metrics_port=0)
COST = ModelCost("native", "int8", 2, 1000, 200, 1500, 64, 16)


@pytest.fixture
async def prefiller(model: Model) -> AsyncIterator[Peer]:
    async with running_worker(model, roles=("prefill",), worker_id="p", telemetry=SHOWN) as peer:
        yield peer


@pytest.fixture
async def decoder(model: Model) -> AsyncIterator[Peer]:
    async with running_worker(
        model, roles=("decode",), worker_id="d", telemetry=SHOWN, stream_timeout_s=0.5, grace_s=1.0
    ) as peer:
        yield peer


async def look(peer: Peer) -> Page:
    """What is there now: the worker refreshes its counts while it is idle."""
    await asyncio.sleep(0.3)
    return await asyncio.to_thread(scrape, peer.worker.metrics.url)


async def hand_off(prefiller: Peer, decoder: Peer, router: MiniRouter, transport: str) -> prefill_pb2.HandoffOutcome:
    request = token_request(PROMPT)
    request.session_id, request.kv_retention_s = "s", 600
    reservation = only_transport(await router.submit(decoder, "r1", request), transport)
    _, outcome = await router.prefill(prefiller, decoder, "r1", request, reservation)
    await router.until_finished("r1", 1)
    return outcome


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_hand_off_is_seen_at_both_ends(prefiller: Peer, decoder: Peer, router: MiniRouter, transport: str) -> None:
    """How its time is split is the scheduler's matter: a short prefill may be over before its push has begun."""
    began = time.monotonic()
    outcome = await hand_off(prefiller, decoder, router, transport)
    took_s = time.monotonic() - began
    sender, receiver = await look(prefiller), await look(decoder)
    assert sender.value("pdmesh_kv_sent_bytes_total", transport=transport) == outcome.kv_bytes > 0
    assert sender.value("pdmesh_kv_handoffs_total", transport=transport) == 1
    assert 0 < sender.value("pdmesh_kv_push_seconds_sum") < took_s
    assert 0 < sender.value("pdmesh_kv_exposed_seconds_sum") < took_s
    assert sender.value("pdmesh_kv_exposed_seconds_sum") == pytest.approx(outcome.kv_exposed_ns / 1e9)
    assert sender.value("pdmesh_engine_tokens_total", kind="prefilled") == len(PROMPT)
    assert sender.value("pdmesh_engine_step_seconds_count", kind="prefill") >= 1
    assert receiver.value("pdmesh_engine_tokens_total", kind="generated") >= 7
    assert receiver.value("pdmesh_engine_step_seconds_count", kind="decode") == receiver.value("pdmesh_engine_steps_total")
    assert receiver.value("pdmesh_engine_batch_sequences_count") == receiver.value("pdmesh_engine_steps_total")
    assert receiver.value("pdmesh_kv_blocks", state="free") == receiver.value("pdmesh_kv_blocks_capacity")
    assert receiver.value("pdmesh_kv_blocks", state="retained") == 4, "48 tokens of the prompt, and 16 of those behind it"
    assert receiver.value("pdmesh_kv_retained_evicted_total") == 0
    assert receiver.value("pdmesh_worker_role", role="decode") == 1 and receiver.value("pdmesh_worker_role", role="prefill") == 0


async def test_a_lease_that_runs_out_is_counted(model: Model) -> None:
    async with running_worker(model, roles=("decode",), worker_id="d", telemetry=SHOWN, lease_s=0.1) as decoder:
        router = MiniRouter()
        await router.attach(decoder)
        await router.submit(decoder, "r1", token_request(PROMPT))
        router.waiting.discard("r1")  # it does not keep it
        await eventually(lambda: not decoder.worker.decode.reservations.active)
        assert (await look(decoder)).value("pdmesh_leases_expired_total") == 1
        await router.detach()


async def test_work_is_less_than_the_machine_can_do(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    await hand_off(prefiller, decoder, router, "shm")
    page = await look(decoder)
    busy_s = page.value("pdmesh_engine_busy_seconds_total")
    assert 0 < page.value("pdmesh_engine_operations_total") < busy_s * page.value("pdmesh_engine_peak_operations")
    assert page.value("pdmesh_engine_moved_bytes_total") > 0 and page.value("pdmesh_engine_peak_bandwidth") > 1e6


async def test_all_of_the_catalogue_is_shown(prefiller: Peer, decoder: Peer, router: MiniRouter) -> None:
    """Speculation's where drafts are made, see the test of a real mesh; those of experts for a model that has some; lent cores
    where workers share a table of them, see tests/mesh/test_cpus.py."""
    await hand_off(prefiller, decoder, router, "shm")
    shown = {sample.name for peer in (prefiller, decoder) for sample in (await look(peer)).samples}
    others = {metrics.CORES, *metrics.KV_REUSE, *metrics.SPECULATION, *metrics.EXPERTS}
    for instrument in set(metrics.ALL) - others:
        assert set(instrument.samples) <= shown, instrument.name


_WORK = st.builds(StepWork, *(st.integers(0, 5000) for _ in range(4)))


@given(_WORK, _WORK)
def test_more_work_never_costs_less(some: StepWork, more: StepWork) -> None:
    both = StepWork(*(a + b for a, b in zip(some, more, strict=True)))
    assert StepCounts.of(both, COST).operations >= StepCounts.of(some, COST).operations
    assert StepCounts.of(some, COST).num_bytes >= COST.weight_bytes


def test_a_step_costs_what_its_shape_says() -> None:
    """Two sequences that attend to 30 tokens: (2 · 1000 + 2 · 200) · 2 for products, 16 · 30 for attention."""
    counts = StepCounts.of(StepWork(0, 0, 2, 30), COST)
    assert counts == StepCounts(4800 + 480, 1500 + 32 * 64)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """Two tokens that take 2 of 8 experts, of 160 bytes each, read 8 · (1 - 0.75 ^ 2) = 3.5 of them."""
    cost = replace(COST, expert_bytes=160, num_experts=8, top_k=2)
    work = StepWork(0, 0, 2, 30)
    assert StepCounts.of(work, cost) == replace(StepCounts.of(work, COST), num_bytes=1500 + 32 * 64 + 560)


def test_verifying_is_the_drafted_share_of_a_step() -> None:
    tally = Tally()
    tally.stepped(1, [])
    tally.computed(8_000_000, 8, 0)
    tally.computed(8_000_000, 8, 2)
    assert tally.stats().verifying_s == pytest.approx(0.002)


class Written:
    """See Readings."""

    def __init__(self) -> None:
        self.of: defaultdict[Instrument, dict[tuple[str, ...], float]] = defaultdict(dict)

    def put(self, instrument: Instrument, value: float, *labels: str) -> None:
        self.of[instrument][labels] = value


def test_a_proposer_that_failed_is_shown() -> None:
    tally, written = Tally(), Written()
    tally.fault("heads")
    stats = EngineStats(*[0] * 17, speculation=tally.stats())  # type: ignore[misc, arg-type]
    read(written, Seen(stats, worker_pb2.LoadReport(), None, {}, 0))
    assert written.of[metrics.FAILED_PROPOSER] == {("heads",): 1}
