"""The load test's sessions on real workers: what it sends again is cached there, and a turn that fails is a session's last."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.measure import Measurement, measure
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome
from pdmesh.loadtest.runner import RunLog, Runner, RunSettings
from pdmesh.loadtest.sessions import Agents
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.traces import TraceRow, link_sessions, scaled
from pdmesh.loadtest.workload import Arrivals, Limits, TrafficClass, Workload, plan
from router.config import RouterConfig
from router.main import Router
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker

BLOCK = 16
SYSTEM, OWN, ANSWER = 64, 40, 12
ONE_AT_A_TIME = Workload(
    Arrivals("constant", 1.0),
    (TrafficClass(input_tokens=fixed(OWN), output_tokens=fixed(ANSWER)),),
    turns=fixed(3),
    agents=Agents(fixed(SYSTEM)),
    max_sessions=1,
)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_tiny(tiny)


@asynccontextmanager
async def serving(tiny: Path, settings: GrpcSettings, *peers: Peer) -> AsyncIterator[GrpcTarget]:
    """A router in front of these workers, to which the load test speaks."""
    workers = tuple(peer.info.address for peer in peers)
    config = RouterConfig(port=0, models=(f"tiny={tiny}",), workers=workers, drain_grace_s=0.3, linger_s=0.0, hedge_share=0.0)
    router = Router(config)
    target = GrpcTarget(await router.start(), replace(settings, vocab_size=VOCAB_SIZE))
    try:
        await eventually(router.core.fleet.ready)
        yield target
    finally:
        await target.close()
        await router.stop()


@pytest.fixture
async def target(model: Model, tiny: Path) -> AsyncIterator[GrpcTarget]:
    async with (
        running_worker(model, roles=("prefill", "decode"), worker_id="w") as worker,
        serving(tiny, GrpcSettings(), worker) as target,
    ):
        yield target


async def run(target: GrpcTarget, workload: Workload, seed: int = 1) -> RunLog:
    return await Runner(target, RunSettings(seed=seed)).run(plan(workload, seed, 60.0))


async def test_later_turns_hit_what_was_sent_and_answered_before(target: GrpcTarget) -> None:
    log = await run(target, ONE_AT_A_TIME)
    assert [record.outcome for record in log.records] == [Outcome.OK] * 3
    for turn, record in enumerate(log.records):
        history = SYSTEM + turn * (OWN + ANSWER)
        assert record.input_tokens == record.prompt_tokens == history + OWN
        # The last token of an answer has no KV yet; caches hold whole blocks.
        assert record.reusable_tokens == (history - 1 if turn else 0)
        assert record.cached_tokens == record.reusable_tokens // BLOCK * BLOCK


async def test_prompts_of_a_scaled_trace_share_their_blocks_on_a_worker(target: GrpcTarget) -> None:
    rows = (TraceRow(0.0, 1024, 64, (1, 2)), TraceRow(0.1, 1536, 64, (1, 2, 3)), TraceRow(0.2, 2100, 64, (1, 2, 3, 4, 5)))
    log = await run(target, Workload(trace=scaled(link_sessions(rows), 8)))
    assert [(record.input_tokens, record.cached_tokens) for record in log.records] == [(128, 0), (192, 128), (262, 192)]
    assert [record.reusable_tokens for record in log.records] == [0, 128, 192]
    assert [record.depth for record in log.records] == [0, 1, 2]


async def test_a_turn_that_the_mesh_refuses_breaks_its_session(target: GrpcTarget) -> None:
    """Without the limit of the model's context a later turn is too long."""
    long = TrafficClass(input_tokens=fixed(OWN), output_tokens=fixed(ANSWER))
    tools = Agents(tool_share=1.0, tool_tokens=fixed(3000))
    workload = Workload(Arrivals("constant", 1.0), (long,), turns=fixed(4), agents=tools, max_sessions=1, limits=Limits())
    book = ObjectiveBook(Objectives(ttft_ms=60_000))
    result = await measure(target, Measurement(workload, book, seed=2, duration_s=1.0, finish_sessions=True))
    assert result.summary.outcomes == {"ok": 1, "error": 1}
    assert any("INVALID_ARGUMENT" in error for error in result.summary.errors)
    sessions = result.sessions
    assert sessions is not None and (sessions.num_broken, sessions.num_turns_lost, sessions.num_complete) == (1, 2, 0)
    assert result.by_turns["later"].attainment == 0.0 and result.by_turns["first"].attainment == 1.0


async def test_separated_workers_report_what_they_did_not_compute_again(model: Model, tiny: Path) -> None:
    """The prefill worker fetches the answers from the decode worker that wrote them."""
    async with (
        running_worker(model, roles=("prefill",), worker_id="prefill", kv_pull="always") as prefill,
        running_worker(model, roles=("decode",), worker_id="decode", kv_pull="always") as decode,
        serving(tiny, GrpcSettings(mode="remote"), prefill, decode) as target,
    ):
        log = await run(target, ONE_AT_A_TIME, seed=3)
        assert [record.cached_tokens for record in log.records] == [r.reusable_tokens // BLOCK * BLOCK for r in log.records]
        num_prefilled = prefill.engine.stats().num_prefilled_tokens
        assert num_prefilled == sum(record.input_tokens - record.cached_tokens for record in log.records)
