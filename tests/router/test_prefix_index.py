"""Told and sent together: which worker holds how much of a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.runtime.files import cache_root_of
from pdmesh.text.block_hash import hash_prompt, short_name
from pdmesh.v1 import common_pb2, worker_pb2
from router.kv_index import index as kv_index_index
from router.kv_index.index import FRESH_S, IN_FLIGHT_S, PrefixIndex
from router.tokenization.prepared_request import PreparedRequest, ServedModel, load, scoped_salt

PROMPT = tuple(range(50, 120))  # four blocks of 16 and a rest
A, B = ("a:1", 1), ("b:1", 2)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load({"tiny": str(model_folder)})["tiny"]


def job_of(model: ServedModel, prompt: tuple[int, ...] = PROMPT, tenant: str = "", salt: str = "") -> PreparedRequest:
    return PreparedRequest(
        "id", model, prompt, common_pb2.SamplingParams(n=1), (), tenant=tenant, cache_salt=scoped_salt(tenant, salt)
    )


def info_of(key: tuple[str, int], *, block_size: int = 16, kv_dtype: str = "float32") -> worker_pb2.WorkerInfo:
    identity = common_pb2.Identity(model="tiny", weights_hash="abc", numeric_mode="exact", protocol_version=3)
    layout = common_pb2.KVLayout(block_size=block_size, kv_dtype=kv_dtype)
    return worker_pb2.WorkerInfo(address=key[0], epoch=key[1], identity=identity, layout=layout)


def names_on_wire(prepared: PreparedRequest, info: worker_pb2.WorkerInfo) -> list[int]:
    """As the worker computes them from what the router sends it."""
    request = prepared.token_request([])
    root = cache_root_of(info.identity, info.layout.kv_dtype, tenant=request.tenant, cache_salt=request.cache_salt)
    return [short_name(block) for block in hash_prompt(root, list(request.prompt_token_ids), info.layout.block_size)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("tenant", "salt"), [("", ""), ("acme", ""), ("acme", "s"), ("", "s")])
def test_finds_what_workers_tell_of(model: ServedModel, tenant: str, salt: str) -> None:
    index, prepared, info = PrefixIndex(1000), job_of(model, tenant=tenant, salt=salt), info_of(A)
    index.set_workers([info])
    assert index.cached_tokens(prepared) == {}
    index.apply(A, names_on_wire(prepared, info)[:3], [])
    assert index.cached_tokens(prepared) == {A: 48}
    other = job_of(model, tenant=tenant + "x", salt=salt)
    assert index.cached_tokens(other) == {}


def test_each_kind_of_worker_has_names_of_its_own(model: ServedModel) -> None:
    index, prepared, small, large = PrefixIndex(1000), job_of(model), info_of(A), info_of(B, block_size=32, kv_dtype="int8")
    index.set_workers([small, large])
    index.apply(A, names_on_wire(prepared, small), [])
    index.apply(B, names_on_wire(prepared, large), [])
    assert index.cached_tokens(prepared) == {A: 64, B: 64}
    assert not set(names_on_wire(prepared, small)) & set(names_on_wire(prepared, large))


def test_what_was_sent_counts_at_once_and_lapses_where_workers_tell(model: ServedModel) -> None:
    clock = Clock()
    index, prepared = PrefixIndex(1000, clock), job_of(model)
    index.set_workers([info_of(A), info_of(B)])
    index.set_followed([A])
    index.remember(prepared, [info_of(A), info_of(B)])
    assert index.cached_tokens(prepared) == {A: 64, B: 64}
    clock.now += IN_FLIGHT_S - 1
    assert index.cached_tokens(prepared) == {A: 64, B: 64}
    clock.now += IN_FLIGHT_S + 1
    assert index.cached_tokens(prepared) == {B: 64}


def test_what_a_worker_says_it_has_evicted_counts_no_more_although_it_was_sent_lately(model: ServedModel) -> None:
    clock = Clock()
    index, prepared, info = PrefixIndex(1000, clock), job_of(model), info_of(A)
    names = names_on_wire(prepared, info)
    index.set_workers([info, info_of(B)])
    index.set_followed([A, B])
    index.remember(prepared, [info, info_of(B)])
    index.apply(A, names, [])
    clock.now += IN_FLIGHT_S + 1  # what was sent is in the older generation now
    index.apply(A, [], names[2:])
    assert index.cached_tokens(prepared) == {A: 32, B: 64}
    index.remember(prepared, [info])
    assert index.cached_tokens(prepared) == {A: 64, B: 64}, "it was sent again since, and will store them"
    index.apply(A, [], names)
    assert index.cached_tokens(prepared) == {B: 64}


def test_a_worker_that_begins_to_tell_is_believed(model: ServedModel) -> None:
    clock = Clock()
    index, prepared = PrefixIndex(1000, clock), job_of(model)
    index.set_workers([info_of(A)])
    index.remember(prepared, [info_of(A)])
    assert index.cached_tokens(prepared) == {A: 64}
    index.set_followed([A])
    assert index.cached_tokens(prepared) == {}
    index.remember(prepared, [info_of(A)])
    assert index.cached_tokens(prepared) == {A: 64}, "it may be on its way"
    clock.now += 2 * IN_FLIGHT_S
    assert index.cached_tokens(prepared) == {}


def test_nothing_of_workers_that_are_gone_is_kept(model: ServedModel) -> None:
    index, prepared = PrefixIndex(1000), job_of(model)
    for epoch in range(1, 50):
        worker = ("a:1", epoch)
        index.set_workers([info_of(worker)])
        index.remember(prepared, [info_of(worker), info_of(("a:1", epoch - 1))])
        assert index.cached_tokens(prepared) == {worker: 64}
        asyncio.run(index.forget(worker))
    assert [len(blocks) for blocks in index._sent.maps(0.0)] == []


def test_a_request_is_looked_up_again_only_after_a_change(model: ServedModel) -> None:
    clock = Clock()
    index, prepared, info = PrefixIndex(1000, clock), job_of(model), info_of(A)
    index.set_workers([info])
    index.apply(A, names_on_wire(prepared, info), [])
    first = index.cached_tokens(prepared)
    assert index.cached_tokens(prepared) is first
    clock.now += 2 * FRESH_S
    assert index.cached_tokens(prepared) is not first
    index.apply(A, [], names_on_wire(prepared, info)[2:])
    assert index.cached_tokens(prepared) == {A: 32}


async def test_the_longer_of_told_and_sent_counts(model: ServedModel) -> None:
    index, prepared, info = PrefixIndex(1000), job_of(model), info_of(A)
    index.set_workers([info])
    index.remember(replace(prepared, prompt=PROMPT[:33], _chains={}), [info])
    index.apply(A, names_on_wire(prepared, info)[:1], [])
    assert index.cached_tokens(prepared) == {A: 32}
    await index.replace(A, names_on_wire(prepared, info))
    assert index.cached_tokens(prepared) == {A: 64}
    await index.forget(A)
    assert index.cached_tokens(prepared) == {}


async def test_replacing_and_forgetting_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_index_index, "SLICE_BLOCKS", 3)
    index = PrefixIndex(1000)
    await index.replace(A, list(range(10)))
    await index.replace(B, list(range(5)))
    assert index.told.match(list(range(12))) == {A: 10, B: 5}
    await index.replace(A, list(range(4, 20)))
    assert set(index.told.blocks_of(A)) == set(range(4, 20))
    await index.forget(A)
    assert index.told.match(list(range(12))) == {B: 5}
    assert len(index.told) == 5


async def test_when_full_the_beginnings_of_a_list_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_index_index, "SLICE_BLOCKS", 3)
    index = PrefixIndex(4)
    await index.replace(A, list(range(10)))
    assert index.told.match(list(range(10))) == {A: 4}


async def test_pool_and_tiers_together_are_what_a_worker_can_restore(model: ServedModel) -> None:
    index, prepared = PrefixIndex(1000), job_of(model)
    index.set_workers([info_of(A), info_of(B)])
    names = names_on_wire(prepared, info_of(A))
    index.apply(A, names[:1], [])
    assert index.look_up(prepared) == ({A: 16}, {}), "no worker has tiers"
    index.apply(A, [], [], names[1:3])
    index.apply(B, [], [], [names[0], names[3]])
    assert index.look_up(prepared) == ({A: 16}, {A: 48, B: 16})
    index.apply(A, names[1:2], [], [], names[1:2])
    assert index.look_up(prepared) == ({A: 32}, {A: 48, B: 16}), "a block that moved from the tiers into the pool"
    index.apply(A, [], names[:1])
    assert index.look_up(prepared) == ({}, {B: 16}), "its beginning is gone"
    await index.replace(A, names[:1], names[:4])
    assert index.look_up(prepared) == ({A: 16}, {A: 64, B: 16})
    await index.replace(A, [], names[:2])
    assert index.look_up(prepared) == ({}, {A: 32, B: 16})
    await index.forget(A)
    await index.forget(B)
    assert index.look_up(prepared) == ({}, {}) and len(index.tiers) == 0


def test_blocks_of_tiers_are_bounded_apart_from_those_of_pools() -> None:
    index = PrefixIndex(100)
    index.apply(A, list(range(100)), [], list(range(1000, 1500)))
    assert len(index.told) == 100 and len(index.tiers) <= 100
