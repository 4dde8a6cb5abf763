"""A rollout in a mesh of real processes: two revisions of a model's workers, two routers, shares, steps and the way back."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.client.types import Generation
from pdmesh.errors import InvalidArgument, NotFound
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig, ProcessPlan
from tests.mesh.checks import Footprint, assert_whole
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
SAMPLED = {"temperature": 0.8, "seed": 11, "max_tokens": 8, "ignore_eos": True}


def revised(plan: ProcessPlan) -> ProcessPlan:
    """The first worker of each role is blue, the second green: the same weights, so that numbers alone would let them pair."""
    if not plan.is_worker:
        return plan
    return replace(plan, argv=(*plan.argv, "--revision", "blue" if plan.name.endswith("0") else "green"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    folder = make_tiny_model(tmp_path_factory.mktemp("rollout") / "tiny", seed=1)
    config = LocalMeshConfig(
        model=str(folder),
        model_name="tiny",
        num_prefill=2,
        num_decode=2,
        num_routers=2,
        port=0,
        num_threads=1,
        adjust=revised,
    )
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


async def ask(client: AsyncClient, number: int, **options: object) -> Generation:
    return await client.generate(f"{number}. The history of the city", timeout=60, **{**SAMPLED, **options})  # type: ignore[arg-type]


async def placed(client: AsyncClient, count: int, **options: object) -> list[tuple[str, str]]:
    """Decode and prefill worker of so many requests, two at a time: a long queue would send some of them elsewhere."""
    places, two = list[tuple[str, str]](), asyncio.Semaphore(2)

    async def one(number: int) -> None:
        async with two:
            timings = (await ask(client, number, **options)).timings
        places.append((timings.decode_worker, timings.prefill_worker))

    await asyncio.gather(*map(one, range(count)))
    return places


async def test_without_a_split_all_take_requests_and_only_workers_of_one_revision_pair(mesh: LocalMesh) -> None:
    async with AsyncClient(mesh.router_addresses[:1]) as client:
        pairs = Counter(await placed(client, 24, mode="remote"))
        (split,) = (await client.status(timeout=5)).splits
    assert set(pairs) == {("decode-0", "prefill-0"), ("decode-1", "prefill-1")}
    assert not split.is_set
    shown = {share.revision: share for share in split.revisions}
    assert {name: (share.num_prefill_workers, share.num_decode_workers) for name, share in shown.items()} == {
        "blue": (1, 1),
        "green": (1, 1),
    }
    assert {name: share.num_ended for name, share in shown.items()} == {
        "blue": pairs["decode-0", "prefill-0"],
        "green": pairs["decode-1", "prefill-1"],
    }
    assert all(share.ttft_ms > 0 and share.tpot_ms > 0 and not share.num_failed for share in shown.values())


async def test_shares_hold_on_both_routers_and_a_session_stays(mesh: LocalMesh) -> None:
    async with AsyncClient(mesh.router_addresses[:1]) as one, AsyncClient(mesh.router_addresses[1:]) as other:
        answer = await one.split_traffic({"blue": 3, "green": 1}, timeout=10)
        assert [(share.revision, share.weight) for share in answer.revisions] == [("blue", 3), ("green", 1)]
        counts = Counter(decode for decode, _ in await placed(one, 60))
        assert 3 <= counts["decode-1"] <= 30 < counts["decode-0"]
        turns = await placed(one, 6, session_id="a-conversation")
        assert len({decode for decode, _ in turns}) == 1
        await one.split_traffic({"green": 1}, timeout=10)
        assert {decode for decode, _ in await placed(one, 12)} == {"decode-1"}

        until = time.monotonic() + 20
        while {decode for decode, _ in await placed(other, 4)} != {"decode-1"}:
            assert time.monotonic() < until, "the other router has not heard of it"
        with pytest.raises(InvalidArgument, match="all weights are 0"):
            await one.split_traffic({"green": 0}, timeout=10)
        with pytest.raises(NotFound):
            await one.split_traffic({"green": 1}, model="unknown", timeout=10)
        assert (await one.split_traffic({}, timeout=10)).is_set is False
    await assert_whole(mesh)


async def command(*arguments: str) -> asyncio.subprocess.Process:
    """`pdmesh rollout`, with what it says in pipes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "pdmesh", "rollout", *arguments, stdout=pipe, stderr=pipe)


async def said(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_rollout_goes_forward_in_steps_and_back_when_its_worker_is_gone(mesh: LocalMesh) -> None:
    router = ("--router", mesh.router_addresses[0])
    async with AsyncClient(mesh.router_addresses[:1]) as client:
        await client.split_traffic({"blue": 1}, timeout=10)
        stop = asyncio.Event()

        async def keep_asking(number: int) -> None:
            while not stop.is_set():
                await ask(client, number)

        asking = [asyncio.create_task(keep_asking(number)) for number in range(4)]
        code, out, err = await said(await command("--to", "green", "--steps", "50,100", "--hold-s", "2", *router))
        assert code == 0 and "went before" not in err and "green: 50 % of new requests to tiny" in out
        assert {decode for decode, _ in await placed(client, 12)} == {"decode-1"}

        back = await command("--to", "blue", "--steps", "50,100", "--hold-s", "60", *router)
        assert back.stdout is not None
        assert b"blue: 50 %" in await back.stdout.readline()
        mesh.kill("decode-0", signal.SIGKILL)
        code, _, err = await said(back)
        assert code == 3 and "new requests go where they went before" in err
        for number in (signal.SIGINT, signal.SIGTERM):
            await mesh.wait_ready(60)
            stopped = await command("--to", "blue", "--steps", "50,100", "--hold-s", "60", *router)
            assert stopped.stdout is not None
            await stopped.stdout.readline()
            stopped.send_signal(number)
            code, _, err = await said(stopped)
            assert code == 3 and "interrupted: new requests go where they went before" in err
        stop.set()
        await asyncio.gather(*asking)
        (split,) = (await client.status(timeout=5)).splits
        assert {share.revision: share.weight for share in split.revisions if share.weight} == {"green": 10_000}
        await mesh.wait_ready(60)
        await client.split_traffic({"blue": 1}, timeout=10)
        mesh.kill("decode-0", signal.SIGKILL)
        assert "decode-1" in {decode for decode, _ in await placed(client, 8)}, "where nobody of blue is there"
        code, out, _ = await said(await command("--clear", *router))
        assert code == 0 and "no split: the policy chooses among all workers" in out
    await mesh.wait_ready(60)
    await assert_whole(mesh, timeout_s=30)


async def test_what_names_no_revision_says_so(mesh: LocalMesh) -> None:
    code, _, err = await said(await command("--to", "red", "--router", mesh.router_addresses[0]))
    assert code == 2 and "Traceback" not in err
    assert "no decode worker has revision 'red'; there are: blue, green" in err
