"""Pools that are kept for a while: opened once, closed when nobody has used them for long enough, and not before."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.transports import common
from kvtransfer.transports.common import KeptPools
from tests.kvtransfer.endpoints import until


class Opened:
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def kept(*keys: str) -> tuple[KeptPools[str, Opened], list[Opened]]:
    """Each with one user."""
    pools = KeptPools[str, Opened]()
    return pools, [pools.use(key, Opened()) for key in keys]


async def test_what_has_another_user_stays() -> None:
    pools, [pool, other] = kept("a", "b")
    assert pools.find("a") is pool and pools.find("b") is other and pools.find("c") is None
    assert pools.use("a", pool) is pool
    pools.release(pool)
    assert len(pools) == 2 and pool.num_closed == 0
    pools.release(pool)
    assert len(pools) == 1 and pool.num_closed == 1  # KEEP_S is 0 in these tests
    assert pools.find("a") is None and other.num_closed == 0


async def test_what_nobody_uses_is_found_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "KEEP_S", 0.01)
    pools, [pool] = kept("a")
    pools.release(pool)
    assert pools.find("a") is pool
    await until(lambda: len(pools) == 0, "the pool is closed")
    assert pool.num_closed == 1


async def test_what_is_used_again_is_closed_as_if_it_had_never_been_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, [pool] = kept("a")
    monkeypatch.setattr(common, "KEEP_S", 0.01)
    pools.release(pool)
    pools.use("a", pool)
    await asyncio.sleep(0.05)
    assert len(pools) == 1 and pool.num_closed == 0
    pools.release(pool)
    await until(lambda: pool.num_closed == 1, "the pool is closed")
    await asyncio.sleep(0.02)
    assert pool.num_closed == 1


async def test_close_takes_what_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "KEEP_S", 0.01)
    pools, [free, used] = kept("a", "b")
    pools.release(free)
    for _ in range(2):
        pools.close()
        assert (free.num_closed, used.num_closed, len(pools)) == (1, 0, 1)
    await asyncio.sleep(0.03)
    assert free.num_closed == 1  # the time it had left ends unnoticed
    pools.release(used)
    pools.close()
    assert used.num_closed == 1 and len(pools) == 0


async def test_a_second_opening_of_a_key_is_a_bug() -> None:
    pools, _ = kept("a")
    with pytest.raises(AssertionError, match="one opening"):
        pools.use("a", Opened())
