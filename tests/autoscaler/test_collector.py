"""The collector against routers on real sockets: names, keys, models, and processes that share a port."""

from __future__ import annotations

import pytest

from pdmesh.autoscaler.collect.collect import Collector
from tests.autoscaler.routers import serving, told_router


async def test_processes_behind_one_port_are_all_heard() -> None:
    routers = [told_router(epoch) for epoch in (1, 2)]
    for router in routers:
        router.status.num_processes = 2
    async with serving(*routers) as port:
        collector = Collector([f"127.0.0.1:{port}"], "m", window_s=10.0)
        for number in range(12):
            await collector.look(2.0 * number)
            for router in routers:
                router.more(3)
        seen = collector.traffic(24.0, 0.9)
        assert all(router.num_asked for router in routers)
        assert seen is not None and seen.rate_per_s == pytest.approx(3.0, rel=0.5), "three every two seconds at each of two"
        await collector.close()


async def test_names_are_resolved_and_keys_are_shown() -> None:
    async with serving(router := told_router(1, key="secret")) as port:
        shut_out = Collector([f"localhost:{port}"], "m", window_s=10.0)
        await shut_out.look(0.0)
        assert "rejects the key" in next(iter(shut_out.problems.values()))
        let_in = Collector([f"localhost:{port}"], "m", window_s=10.0, api_key="secret")
        await let_in.look(0.0)
        assert not let_in.problems and let_in.heard_s == 0.0
        nobody = Collector(["no-such-host.invalid:1"], "m", window_s=10.0)
        await nobody.look(0.0)
        assert "cannot be resolved" in nobody.problems["no-such-host.invalid:1"]
        other = Collector([router.address], "other", window_s=10.0, api_key="secret")
        await other.look(0.0)
        assert "no traffic of model 'other'; it reports m" in other.problems[router.address]
        for collector in (shut_out, let_in, nobody, other):
            await collector.close()
