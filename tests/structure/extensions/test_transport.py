"""A KV transport is one module and one line of `kvtransfer/transports/registry.py`: workers offer it and register what it
reaches, the router pairs by that, and KV moves over it."""

import ast
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.layout import Reach, Scope
from kvtransfer.transports.registry import TRANSPORTS, installed, transports_with
from kvtransfer.transports.tcp import TcpTransport
from pdmesh.doctor import transfer
from pdmesh.v1 import worker_pb2
from tests.router.mesh import Mesh, config_for, request, running_router
from tests.structure.source_names import ROOT
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tests.support.worker_mesh import REMOTE, load_tiny, running_worker

NAME = "loopback"


class LoopbackTransport(TcpTransport):
    """tcp, for workers of one host that have the same layout."""

    name = NAME
    reach = Reach(Scope.HOST, same_layout=True)
    summary = "an example"
    is_default = False


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line of the registry."""
    monkeypatch.setitem(TRANSPORTS, NAME, LoopbackTransport)


@asynccontextmanager
async def mesh_over_it(folder: Path, **engine_of_decode: object) -> AsyncIterator[Mesh]:
    """A router and two workers in this process that offer nothing else."""
    make_tiny_model(folder)
    model = load_tiny(folder)
    async with (
        running_worker(model, roles=("prefill",), worker_id="p", transports=(NAME,)) as prefill,
        running_worker(model, roles=("decode",), worker_id="d", transports=(NAME,), engine=engine_of_decode) as decode,
    ):
        assert [(each.transport, each.scope, each.same_layout) for each in decode.info.transport_reach] == [
            (NAME, worker_pb2.REACH_SCOPE_HOST, True)
        ]
        config = replace(config_for(folder), workers=(prefill.info.address, decode.info.address))
        async with running_router(config) as (router, stub):
            await eventually(lambda: len(router.core.fleet.views()) == 2)
            await eventually(lambda: sum(view.decode for view in router.core.fleet.views()) == 1)
            yield Mesh(router, stub, {})


async def test_a_request_takes_it(tmp_path: Path) -> None:
    async with mesh_over_it(tmp_path) as mesh:
        answer = await mesh.generate(request(mode=REMOTE))
        assert len(answer.tokens()) == 8
        assert answer.timings.transport == NAME
        assert answer.timings.kv_bytes > 0


async def test_the_router_does_not_pair_beyond_its_reach(tmp_path: Path) -> None:
    async with mesh_over_it(tmp_path, block_size=32) as mesh:
        answer = await mesh.generate(request())
        assert (len(answer.tokens()), answer.timings.transport, answer.timings.prefill_worker) == (8, "", "")


def test_the_doctor_shows_it() -> None:
    known = transports_with(None)
    assert NAME in installed()  # it is measured
    assert transfer.judge({NAME: 1e9}, {}, known).found == f"{NAME} 1.00 GB/s; on this host none; across hosts none"


def test_the_router_knows_no_transport_by_name() -> None:
    """Names stand in what workers register; the router compares what they reach."""
    named = []
    for path in sorted((ROOT / "router").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in TRANSPORTS:
                named.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtransfer.transports"):
                named.append(f"{path.relative_to(ROOT)}:{node.lineno}: imports {node.module}")
    assert not named, named
