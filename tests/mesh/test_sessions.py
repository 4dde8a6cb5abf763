"""Sessions on real workers: the next turn of each goes where its KV is, the client is told how much was cached, and a release is
answered by workers of any version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import common_pb2, mesh_pb2
from router.config import RouterConfig
from tests.mesh import oracle
from tests.router.mesh import Answer, Mesh, running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Peer, load_tiny, running_worker

BLOCK = 16
NUM_OTHERS = 8


@pytest.fixture
async def meshed(tiny: Path) -> AsyncIterator[tuple[Mesh, list[Peer]]]:
    """A router and two decode workers in this process, with real gRPC and Redis between them."""
    model = load_tiny(tiny)
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(EmbeddedRedis())
        peers = [
            await stack.enter_async_context(running_worker(model, roles=("decode",), worker_id=name, redis=redis.url))
            for name in ("d0", "d1")
        ]
        addresses = tuple(peer.info.address for peer in peers)
        config = RouterConfig(
            port=0,
            models=(f"tiny={tiny}",),
            workers=addresses,
            redis=redis.url,
            drain_grace_s=0.3,
            linger_s=0.0,
            policy="prefix",  # the default also weighs measured step times, which differ beside other tests
        )
        router, stub = await stack.enter_async_context(running_router(config))
        await eventually(lambda: sum(view.decode for view in router.core.fleet.views()) == 2)
        await eventually(lambda: len(router.core.prefixes._followed) == 2)  # KV events arrive from now on
        yield Mesh(router, stub, {}), peers


def turn(prompt: Sequence[int], session_id: str = "") -> mesh_pb2.GenerateRequest:
    return mesh_pb2.GenerateRequest(
        tokens=mesh_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
        options=mesh_pb2.RequestOptions(session_id=session_id, kv_retention_s=60 if session_id else 0),
    )


async def test_second_turns_go_to_their_kv_while_others_come_and_go(meshed: tuple[Mesh, list[Peer]]) -> None:
    mesh, peers = meshed
    fleet, prompts = mesh.router.core.fleet, {"a": oracle.prompt_of(500, 250), "b": oracle.prompt_of(501, 250)}
    first: dict[str, Answer] = {}
    for (name, prompt), peer, other in zip(prompts.items(), peers, reversed(peers), strict=True):
        other.worker.gate.draining = True  # so that each session begins on a worker of its own
        await eventually(lambda: len(fleet.views()) == 1)
        first[name] = await mesh.generate(turn(prompt, name))
        assert first[name].timings.decode_worker == peer.info.worker_id
        other.worker.gate.draining = False
        await eventually(lambda: len(fleet.views()) == 2)
    await asyncio.gather(*(mesh.generate(turn(oracle.prompt_of(number, 200))) for number in range(NUM_OTHERS)))
    whole = {name: [*prompt, *first[name].tokens()] for name, prompt in prompts.items()}
    second = await asyncio.gather(*(mesh.generate(turn([*tokens, 70, 71], name)) for name, tokens in whole.items()))
    for name, answer in zip(prompts, second, strict=True):
        assert answer.timings.decode_worker == first[name].timings.decode_worker
        assert answer.completed is not None
        assert answer.completed.usage.cached_tokens == (len(whole[name]) - 1) // BLOCK * BLOCK  # the last token had no KV
    released = await mesh.stub.ReleaseSession(mesh_pb2.ReleaseSessionRequest(session_id="a"))
    again = await mesh.stub.ReleaseSession(mesh_pb2.ReleaseSessionRequest(session_id="a"))
    assert released.num_unreachable == again.num_unreachable == 0
    assert (again.num_blocks, again.num_workers) == (0, 0) and released.num_workers <= 1


async def test_the_turn_right_after_the_last_token_finds_all_of_its_kv(
    meshed: tuple[Mesh, list[Peer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No KV event has come by then: the router knows what it has sent, and what came."""
    mesh, _ = meshed
    index, prompt = mesh.router.core.prefixes, oracle.prompt_of(502, 250)
    monkeypatch.setattr(index, "apply", lambda *changes: None)
    answer = await mesh.generate(turn(prompt, "s"))
    history = [*prompt, *answer.tokens()]
    dry = mesh_pb2.ExplainRequest(generate=turn([*history, 70], "s"))
    (decision,) = (await mesh.stub.Explain(dry)).decisions
    chosen = decision.candidates[0]
    assert chosen.decode_worker_id == answer.timings.decode_worker
    assert chosen.decode_cached_tokens == (len(history) - 1) // BLOCK * BLOCK and "the session's last worker" in chosen.note
