"""A saved state that nobody can read, over real HTTP: whoever leads next begins anew, and leads."""

from __future__ import annotations

import json

import pytest

from pdmesh.autoscaler.platform import Asked
from pdmesh.autoscaler.views import PoolName
from tests.autoscaler.kubernetes.api_server import MAPS, ApiServer
from tests.autoscaler.kubernetes.conftest import Open

NOW_S = 50.0
PATH = f"{MAPS}/pdmesh-autoscaler-state"


@pytest.mark.parametrize("rubbish", ["{", "[1]", '{"a": Infinity}', '{"a": -1e999}', '{"a": NaN}', "[" * 100_000, ""])
async def test_what_cannot_be_read_is_begun_anew_and_written_over(candidate: Open, server: ApiServer, rubbish: str) -> None:
    first = await candidate()
    assert await first.leads(NOW_S)
    await first.save({"a": 1})
    await first.close()
    server.put(PATH, server.objects[PATH] | {"data": {"policy.json": rubbish, "asked.json": rubbish}})
    second = await candidate()
    assert await second.leads(NOW_S)
    assert await second.load() is None
    assert await second.observe(NOW_S) == {PoolName.PREFILL: Asked(2), PoolName.DECODE: Asked(2)}
    await second.save({"a": 2})
    data = server.objects[PATH]["data"]
    assert json.loads(data["policy.json"]) == {"a": 2} and "pdmesh-decode" not in data["asked.json"]
    assert json.loads(data["asked.json"])["decode"]["ours"] == [2]


async def test_an_infinite_time_of_a_change_holds_nobody(candidate: Open, server: ApiServer) -> None:
    """A person's change that was in the endless future would keep the pool as it is for ever."""
    first = await candidate()
    assert await first.leads(NOW_S)
    await first.observe(NOW_S)
    await first.close()
    entries = json.loads(server.objects[PATH]["data"]["asked.json"])
    entries["decode"]["changed_s"] = float("inf")
    server.put(PATH, server.objects[PATH] | {"data": {"asked.json": json.dumps(entries)}})
    second = await candidate()
    assert await second.leads(NOW_S)
    assert (await second.observe(NOW_S))[PoolName.DECODE] == Asked(2)
