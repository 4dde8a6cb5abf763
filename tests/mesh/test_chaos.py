"""The chaos suite at work: a dozen faults of all kinds in a mesh of a tiny model. `make chaos` deals thousands."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.campaign import Campaign
from tests.chaos.faults import LogStands
from tests.chaos.load import Load, Sizes, make_jobs
from tests.chaos.mesh import ChaosMesh, MeshSize
from tests.chaos.plan import ANY_MOMENT, Kind, make_plan
from tests.chaos.record import Round

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs 127.0.0.0/8, /proc and LD_PRELOAD"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="clock jumps need a C compiler"),
]

MAX_HOLD_S = 1.5


async def test_logs_that_stand_still_stop_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipes of all processes are full, and they have much to say."""
    monkeypatch.setenv("PDMESH_LOG", "debug")
    jobs = make_jobs(tiny, Sizes(prompt=(40, 120), output=(8, 32), first_id=1, last_id=250), seed=1, count=16)
    mesh = ChaosMesh(MeshSize(tiny, num_prefill=1, num_decode=1, kv_memory_mb=16), tmp_path)
    async with mesh:
        [plan] = make_plan(5, 1, [Kind.LOG_STANDS])
        faults = [LogStands(plan, victim, mesh) for victim in mesh.victims]
        for fault in faults:
            assert await fault.strike()
        load = Load(mesh.routers, jobs, seed=1, num_clients=6)
        async with load.running():
            await asyncio.sleep(MAX_HOLD_S)
        tally = load.take_tally()
        for fault in faults:
            await fault.mend()
    assert report.failures([Round("test", 0, 1.0, [], [], tally)]) == []
    assert mesh.left_behind() == []
    assert tally.num_tokens > 500


async def test_a_dozen_faults_cost_nobody_a_token(tiny: Path, tmp_path: Path) -> None:
    plan = [fault for fault in make_plan(5, 400) if fault.hold_s <= MAX_HOLD_S or fault.kind is Kind.SHM_FULL]
    at_states = [fault for kind in Kind for fault in [f for f in plan if f.kind is kind and f.state != ANY_MOMENT][:1]]
    at_any = [fault for fault in plan if fault.state == ANY_MOMENT][:3]
    jobs = make_jobs(tiny, Sizes(prompt=(40, 120), output=(8, 32), first_id=1, last_id=250), seed=1, count=16)
    mesh = ChaosMesh(MeshSize(tiny, num_prefill=2, num_decode=2, kv_memory_mb=16), tmp_path)
    async with mesh:
        campaign = Campaign("test", mesh, Load(mesh.routers, jobs, seed=1, num_clients=6))
        done = await campaign.round(0, [*at_states, *at_any])
    assert report.failures([done]) == []
    assert mesh.left_behind() == []
    assert done.blocks_leaked == 0
    assert len(done.dealt) >= 12
    assert done.tally.num_tokens > 1000
