"""What the router knows of adapters: which may change, which are wanted, and that a request goes to workers that have its own."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pdmesh.adapter_id import AdapterId, check_adapter_name
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.runtime.rpc import mesh_secret
from pdmesh.runtime.rpc.mesh_secret import MeshSecret, write_secret
from pdmesh.v1 import common_pb2, worker_pb2
from router.config import RouterConfig
from router.fleet.adapters import UNWANTED, AdapterKey, FleetAdapters, Wanted, WantedAdapters
from router.fleet.registry import FleetRegistry
from router.routing.filters import NoPlacement, RoutingRequest, can_prefill, explain_no_candidate, same_kind
from router.routing.worker_reports import adapters_of
from tests.router.fleets import worker
from tests.support.certificates import new_secret

A, B = AdapterId("a", "1" * 64), AdapterId("b", "2" * 64)
KEY = AdapterKey("m", "a")


def test_reports_name_adapters() -> None:
    infos = [common_pb2.AdapterInfo(name=each.name, digest=each.digest, rank=8) for each in (A, B)]
    assert adapters_of(worker_pb2.LoadReport(adapters=infos)) == {A, B}
    assert adapters_of(worker_pb2.LoadReport()) == frozenset()


def test_a_request_goes_where_its_adapter_is() -> None:
    with_a = replace(worker("pd0"), adapters=frozenset({A}))
    other = replace(worker("pd1"), adapters=frozenset({AdapterId("a", "3" * 64), B}))
    asked = RoutingRequest(with_a.model, 40, max_total_tokens=50, adapter=A)
    assert same_kind(with_a, asked) and can_prefill(with_a, asked)
    for each in (other, worker("pd2")):
        assert not same_kind(each, asked) and not can_prefill(each, asked)
        assert same_kind(each, replace(asked, adapter=None))
    refused = explain_no_candidate([other], asked)
    assert isinstance(refused, NoPlacement)
    assert "that is reachable has adapter 'a' loaded" in refused.reason


@pytest.mark.parametrize(
    ("setting", "keys", "expected"),
    [("auto", "", True), ("auto", "keys.toml", False), ("on", "keys.toml", True), ("off", "", False)],
)
def test_who_may_change_adapters(setting: str, keys: str, expected: bool) -> None:
    config = RouterConfig(models=("m=/x",), adapter_changes=setting, api_keys=keys)  # type: ignore[arg-type]
    assert config.lets_clients_change_adapters is expected


async def test_adapters_of_the_last_workers_can_be_asked_for_while_there_are_none() -> None:
    has_a = SimpleNamespace(last=SimpleNamespace(info=worker_pb2.WorkerInfo(), adapters=frozenset({A})), current=True)
    has_a.last.info.identity.model = "m"
    workers = {"w": has_a}
    fleet = SimpleNamespace(workers=workers, serves=lambda model: bool(workers))
    wanted = WantedAdapters("", "default")
    adapters = FleetAdapters(cast(FleetRegistry, fleet), wanted, may_change=True)
    assert adapters.find("b", ["m"]) is None
    adapters._remember()
    workers.clear()
    adapters._remember()
    assert adapters.find("a", ["m"]) == ("m", A) and adapters.names(["m"]) == [("m", "a")]
    assert adapters.find("a", ["other"]) is None and adapters.find("b", ["m"]) is None
    await wanted.put(KEY, UNWANTED)
    assert adapters.find("a", ["m"]) is None and adapters.names(["m"]) == []


async def test_without_redis_a_router_remembers_by_itself() -> None:
    wanted = WantedAdapters("", "default")
    await wanted.put(KEY, Wanted("/x", "d"))
    await wanted.refresh()
    assert wanted.entries == {KEY: Wanted("/x", "d")}


async def test_routers_agree_through_redis(tmp_path: Path) -> None:
    async with EmbeddedRedis() as redis:
        one, other, of_another_mesh = (WantedAdapters(redis.url, mesh) for mesh in ("m", "m", "n"))
        await one.put(KEY, Wanted('/folder, with "quotes"', "d"))
        await one.put(AdapterKey("m", "gone"), UNWANTED)
        for each in (other, of_another_mesh):
            await each.refresh()
        assert other.entries == one.entries == {KEY: Wanted('/folder, with "quotes"', "d"), AdapterKey("m", "gone"): UNWANTED}
        assert not of_another_mesh.entries
        await other.put(KEY, UNWANTED)
        await one.refresh()
        assert not one.entries[KEY].is_wanted
        for each in (one, other, of_another_mesh):
            await each.close()


async def test_an_entry_of_an_outsider_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who can write into Redis cannot make workers open a folder of theirs."""
    ours, key, wanted = new_secret(tmp_path), AdapterKey("tiny", "legal"), Wanted("/adapters/legal", "ab" * 32)
    async with EmbeddedRedis() as redis:
        writer, reader = (WantedAdapters(redis.url, "m", ours) for _ in range(2))
        outsiders = [WantedAdapters(redis.url, "m", secret) for secret in (None, new_secret(tmp_path))]
        await writer.put(key, wanted)
        for number, outsider in enumerate(outsiders):
            await outsider.put(AdapterKey("tiny", f"theirs-{number}"), Wanted("/tmp/theirs", ""))
        for _ in range(2):
            await reader.refresh()
            assert reader.entries == {key: wanted}
        assert caplog.text.count("is ignored: it is not signed") == 1
        assert caplog.text.count("is ignored: it is signed with another mesh secret") == 1
        for each in (writer, reader, *outsiders):
            await each.close()


async def test_entries_outlive_a_rotation_of_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_secret, "_RECHECK_S", 0.0)
    file = tmp_path / "rotated"
    secret, key, wanted = MeshSecret(write_secret(file)), AdapterKey("tiny", "legal"), Wanted("/adapters/legal", "ab" * 32)
    former, new = file.read_text().strip(), secrets.token_hex(32)
    async with EmbeddedRedis() as redis:
        writer = WantedAdapters(redis.url, "m", secret)
        await writer.put(key, wanted)
        for lines in ((former, new), (new, former), (new,)):
            file.write_text("\n".join(lines))
            router = WantedAdapters(redis.url, "m", secret)
            await router.refresh()
            assert router.entries == {key: wanted}, lines
            await router.close()
        await writer.close()


async def test_what_redis_did_not_take_is_told_later() -> None:
    async with EmbeddedRedis() as redis:
        url = redis.url
    wanted = WantedAdapters(url, "m")
    await wanted.put(KEY, Wanted("/x", "d"))
    await wanted.refresh()
    assert wanted.entries == {KEY: Wanted("/x", "d")}
    await wanted.close()


def test_roots_differ() -> None:
    roots = {
        A.root(b"r"),
        B.root(b"r"),
        A.root(b"s"),
        AdapterId("a", "2" * 64).root(b"r"),
        AdapterId("a1", "1" * 63).root(b"r"),
        b"r",
    }
    assert len(roots | {b"r"}) == 6


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "ä", "a" * 129, "a=b", "a,b"])
def test_bad_names(name: str) -> None:
    with pytest.raises(ValueError, match="is not 1 to 128"):
        check_adapter_name(name)
