"""Who leads when candidates die, hang, resign, and when the API server does: on real clocks, with a Lease of two seconds."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from pdmesh.autoscaler.kubernetes.platform import KubernetesPlatform
from pdmesh.autoscaler.platform import PlatformError
from pdmesh.autoscaler.views import PoolDecision, PoolName
from tests.autoscaler.kubernetes.api_server import LEASES, ApiServer
from tests.autoscaler.kubernetes.conftest import Open

LEASE = f"{LEASES}/pdmesh-autoscaler"


async def _until_leads(platform: KubernetesPlatform, timeout_s: float) -> float:
    """How long it took, in seconds."""
    begin = time.monotonic()
    while time.monotonic() < begin + timeout_s:
        if await platform.leads(0.0):
            return time.monotonic() - begin
        await asyncio.sleep(0.02)
    raise AssertionError(f"does not lead after {timeout_s} s")


def _kill(platform: KubernetesPlatform) -> None:
    """As SIGKILL would: nothing is given back."""
    task = platform._elector._task
    assert task is not None
    task.cancel()


async def test_one_leads_and_the_other_waits(candidate: Open, server: ApiServer) -> None:
    one, two = await candidate(), await candidate()
    assert await one.leads(0.0)
    assert not await two.leads(0.0)
    await asyncio.sleep(2.5)  # longer than the Lease: it is renewed
    assert await one.leads(0.0) and not await two.leads(0.0)
    spec = server.objects[LEASE]["spec"]
    assert spec["holderIdentity"] == one._elector.identity
    assert (spec["leaseTransitions"], spec["leaseDurationSeconds"]) == (0, 2)
    assert spec["renewTime"] > spec["acquireTime"]


async def test_of_several_that_start_together_one_leads(candidate: Open) -> None:
    platforms = [await candidate() for _ in range(4)]
    assert sorted(await asyncio.gather(*(each.leads(0.0) for each in platforms))) == [False, False, False, True]


async def test_the_lease_moves_when_the_leader_is_killed_and_not_before_it_runs_out(candidate: Open, server: ApiServer) -> None:
    one, two = await candidate(), await candidate()
    assert await one.leads(0.0) and not await two.leads(0.0)
    _kill(one)
    assert 1.5 < await _until_leads(two, 5.0) < 4.0
    assert server.objects[LEASE]["spec"]["leaseTransitions"] == 1
    assert not await one.leads(0.0)


async def test_it_moves_at_once_when_the_leader_ends(candidate: Open, caplog: pytest.LogCaptureFixture) -> None:
    one, two = await candidate(), await candidate()
    assert await one.leads(0.0) and not await two.leads(0.0)
    caplog.set_level(logging.INFO)
    await one.close()
    await one.close()
    assert f"{one._elector.identity} has given up the lead" in caplog.messages
    assert await _until_leads(two, 5.0) < 1.0


async def test_in_an_outage_the_leader_steps_down_and_leads_again_afterwards(
    candidate: Open, server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    one = await candidate()
    assert await one.leads(0.0)
    await one.observe(0.0)
    server.stop()
    assert await one.leads(0.0)  # a short one changes nothing
    with pytest.raises(PlatformError, match="cannot reach the API server"):
        await one.observe(0.0)
    await asyncio.sleep(1.2)
    with pytest.raises(PlatformError, match="leases/pdmesh-autoscaler: cannot reach the API server"):
        await one.leads(0.0)
    with pytest.raises(PlatformError):
        await one.scale(PoolDecision(PoolName.DECODE, 2, 5, "x"), 5, 0.0)
    assert f"{one._elector.identity} could not renew the Lease for 1 s, and no longer leads" in caplog.messages
    server.start()
    await asyncio.sleep(0.5)
    assert await _until_leads(one, 3.0) < 3.0
    await one.observe(0.0)
    assert server.replicas("pdmesh-decode") == 2


async def test_a_server_that_hangs_is_an_outage_too(candidate: Open, server: ApiServer) -> None:
    one = await candidate()
    assert await one.leads(0.0)
    server.slow_s = 5.0
    begin = time.monotonic()
    with pytest.raises(PlatformError, match=r"has not answered within 0.5 s|cannot ask"):
        await one.observe(0.0)
    assert time.monotonic() < begin + 1.5
    await asyncio.sleep(1.2)
    with pytest.raises(PlatformError):
        await one.leads(0.0)
    server.slow_s = 0.0


async def test_who_cannot_renew_has_stepped_down_before_another_leads(candidate: Open) -> None:
    """It stops, then the other one starts; never both."""
    one, two = await candidate(), await candidate()
    assert await one.leads(0.0) and not await two.leads(0.0)
    _kill(one)
    both, end = 0, time.monotonic() + 3.0
    while time.monotonic() < end:
        both += one._elector.leads and two._elector.leads
        await asyncio.sleep(0.005)
    assert both == 0 and two._elector.leads


async def test_without_the_right_to_the_lease_nobody_leads_and_everybody_is_told(candidate: Open, server: ApiServer) -> None:
    server.refuse[f"GET {LEASES}"] = 403
    one = await candidate()
    with pytest.raises(PlatformError, match=r"403 .*rights in k8s/components/autoscaler/rbac\.yaml"):
        await one.leads(0.0)


async def test_a_new_term_reads_what_the_other_leader_left(candidate: Open, server: ApiServer) -> None:
    """One leads, is cut off, another scales, one leads again: what the other asked for is no person's change."""
    one, two = await candidate(), await candidate()
    assert await one.leads(0.0) and not await two.leads(0.0)
    await one.observe(0.0)
    await one.scale(PoolDecision(PoolName.DECODE, 2, 3, "x"), 3, 0.0)
    _kill(one)
    await _until_leads(two, 5.0)
    await two.observe(0.0)
    await two.scale(PoolDecision(PoolName.DECODE, 3, 6, "x"), 6, 0.0)
    one._elector._task = None  # its network is back
    assert not await one.leads(0.0)
    await two.close()
    await asyncio.sleep(0.3)
    await _until_leads(one, 5.0)
    assert (await one.observe(0.0))[PoolName.DECODE].hold is None
