"""Whose KV a worker is told to fetch: what a pool has, or what a peer restores first, whichever is predicted to be quicker."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.v1 import common_pb2, worker_pb2
from router.context import RouterContext
from router.lifecycle.kv_holder import find_holder
from router.lifecycle.request import Dispatch
from router.routing.filters import RoutingRequest

SPEED = LatencyModel(1e-3, 5e-4, 0.0, 1e-3, 0.0)
"""A prompt token takes 0.5 ms to compute."""
TOKENS = 1001


def info(name: str, block_size: int = 16, fetch_token_s: float = 1e-5) -> worker_pb2.WorkerInfo:
    layout = common_pb2.KVLayout(block_size=block_size)
    return worker_pb2.WorkerInfo(address=name, epoch=1, layout=layout, fetch_token_s=fetch_token_s)


def found(
    cached: Mapping[str, int],
    restorable: Mapping[str, int],
    restore_token_s: float = 1e-5,
    latency: LatencyModel | None = SPEED,
    infos: Mapping[str, worker_pb2.WorkerInfo] | None = None,
) -> tuple[str, int, int] | None:
    """Return the worker that "us" asks: address, tokens, those of them in tiers alone."""
    infos = {name: info(name) for name in ("us", "a", "b")} | dict(infos or {})
    view = SimpleNamespace(latency=latency, max_num_batched_tokens=512, restore_token_s=restore_token_s, private_tiers=False)
    workers = {name: SimpleNamespace(current=SimpleNamespace(info=each), view=view) for name, each in infos.items()}
    core = SimpleNamespace(fleet=SimpleNamespace(workers=workers, suspects=frozenset()))
    request = RoutingRequest(
        "m",
        TOKENS,
        cached_tokens={(name, 1): tokens for name, tokens in cached.items()},
        restorable_tokens={(name, 1): tokens for name, tokens in restorable.items()},
    )
    asked = SimpleNamespace(avoid=frozenset(), failed_holders=frozenset())
    dispatch: Any = SimpleNamespace(request=asked, routing_request=request, tried=frozenset())
    holder = find_holder(cast("RouterContext", core), cast("Dispatch", dispatch), infos["us"], "r")
    return None if holder is None else (holder.address, holder.num_tokens, holder.num_tier_tokens)


def test_what_no_pool_has_is_fetched_from_tiers() -> None:
    assert found({}, {"a": 800}) == ("a", 800, 800)
    assert found({"a": 160}, {"a": 800}) == ("a", 800, 640)
    assert found({}, {"a": 5000}) == ("a", 992, 992), "the last token is computed, and blocks are whole"


@pytest.mark.parametrize(("restore_token_s", "holder"), [(1e-5, ("a", 800, 800)), (2e-3, ("b", 320, 0))])
def test_a_pool_and_tiers_are_compared_by_their_time(restore_token_s: float, holder: tuple[str, int, int]) -> None:
    assert found({"b": 320}, {"a": 800, "b": 320}, restore_token_s) == holder


def test_a_pool_is_asked_where_no_speed_is_known_or_it_has_all() -> None:
    assert found({"b": 320}, {"a": 800}, latency=None) == ("b", 320, 0)
    assert found({"b": 800}, {"a": 800}) == ("b", 800, 0)
    assert found({"b": 320}, {"a": 800}, restore_token_s=0.0) == ("b", 320, 0)


def test_a_worker_asks_for_nothing_that_its_own_tiers_have() -> None:
    assert found({}, {"a": 800, "us": 800}) is None
    assert found({}, {"a": 816, "us": 800}) == ("a", 816, 816)
    assert found({"us": 800}, {"a": 800, "us": 800}) is None


def test_peers_with_other_blocks_are_not_asked() -> None:
    assert found({}, {"a": 800}, infos={"a": info("a", block_size=32)}) is None
    assert found({}, {"a": 800}, infos={"us": info("us", fetch_token_s=0.0)}) is None
    assert found({}, {"gone": 800}) is None
