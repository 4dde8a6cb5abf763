"""Where traces are not sampled, those of requests that went badly arrive all the same, from every process; and where nobody takes
them, nobody notices."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Generation
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.sampling_params import SamplingParams
from tests.mesh import oracle
from tests.mesh.checks import assert_whole
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.traces import REMOTE_SPANS, trace_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def collector() -> AsyncIterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tiny: Path, collector: OtlpReceiver) -> AsyncIterator[LocalMesh]:
    config = LocalMeshConfig(
        model=str(tiny), port=0, num_threads=1, otlp_endpoint=collector.endpoint, env={"PDMESH_TRACE_SHARE": "0"}
    )
    async with LocalMesh(config) as mesh:
        yield mesh


async def ask(mesh: LocalMesh, number: int, *, slo_ttft_ms: int = 0) -> Generation:
    async with AsyncClient(mesh.router_addresses) as client:
        return await client.generate(
            oracle.prompt_of(number, 100),
            temperature=0,
            max_tokens=8,
            ignore_eos=True,
            mode="remote",
            request_id=f"r{number}",
            slo_ttft_ms=slo_ttft_ms,
            timeout=60,
        )


async def test_a_missed_objective_is_kept_by_all_processes(mesh: LocalMesh, collector: OtlpReceiver) -> None:
    for number in range(9500, 9504):
        await ask(mesh, number)
    bad = await ask(mesh, 9510, slo_ttft_ms=1)
    trace = await trace_of(collector, bad.request_id, REMOTE_SPANS, lambda trace: len(trace.of("prefill", "prefill")) == 1)
    assert trace.root.attributes["pdmesh.slo.met"] is False
    assert {span.process.partition("-")[0] for span in trace.spans} == {"router", "prefill", "decode"}
    assert {span.trace_id for span in collector.spans} == {trace.root.trace_id}, "nobody asked for the others"


async def test_a_collector_that_goes_away_costs_no_request_anything(mesh: LocalMesh, collector: OtlpReceiver, tiny: Path) -> None:
    await asyncio.to_thread(collector.stop)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number in range(9520, 9524):
        result = await ask(mesh, number, slo_ttft_ms=1)
        assert [list(result.token_ids)] == oracle.answer(tiny, oracle.prompt_of(number, 100), params)
    await assert_whole(mesh)
