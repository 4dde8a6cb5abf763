"""What a router tells a worker that starts, and what it does about each answer. The workers are stubs behind real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdmesh.runtime.errors import InvalidArgument, MeshError, ResourceExhausted, Unavailable, Unimplemented
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.kv_index import hot_prefixes, warming
from router.kv_index.hot_prefixes import block_kind
from tests.router import stub_model
from tests.router.mesh import Mesh, mesh_of, request, write_model
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

SIZE = stub_model.BLOCK_SIZE
FIRST, SECOND = list(range(64, 64 + 3 * SIZE)), list(range(100, 100 + 2 * SIZE))
THIRD = list(range(130, 130 + 2 * SIZE))
Answers = Callable[[worker_pb2.WarmPrefixRequest], worker_pb2.WarmPrefixResponse]


def everything(asked: worker_pb2.WarmPrefixRequest) -> worker_pb2.WarmPrefixResponse:
    num_tokens = len(asked.request.prompt_token_ids)
    return worker_pb2.WarmPrefixResponse(num_tokens=num_tokens, num_cached_tokens=num_tokens)


@dataclass(eq=False)
class ColdWorker(StubWorker):
    """Takes prefixes, and answers as it is told to: the last answer again and again."""

    warm_blocks: int = 100
    answers: list[Answers | MeshError] = field(default_factory=lambda: [everything])
    asked: list[worker_pb2.WarmPrefixRequest] = field(default_factory=list)

    def info(self) -> worker_pb2.WorkerInfo:
        info = super().info()
        info.warm_blocks = self.warm_blocks
        return info

    async def WarmPrefix(  # type: ignore[override]
        self, request: worker_pb2.WarmPrefixRequest, context: Any
    ) -> worker_pb2.WarmPrefixResponse:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, MeshError):
            raise answer
        return answer(request)

    @property
    def prefixes(self) -> list[list[int]]:
        return [list(each.request.prompt_token_ids) for each in self.asked]


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "LOOK_S", "FIRST_GAP_S"):
        monkeypatch.setattr(warming, name, 0.01)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A worker that has the prompts of three requests and of two; one of its kind had none of them."""
    workers = [StubWorker("d0", (DECODE, PREFILL)), StubWorker("d1", (DECODE,), max_num_seqs=1)]
    async with mesh_of(write_model(tmp_path), workers) as mesh:
        followed = mesh.router.follower._followed
        await eventually(lambda: len(followed) == 2 and all(each.position is not None for each in followed.values()))
        mesh["d1"].draining = True
        await eventually(lambda: len(mesh.router.core.fleet.views()) == 1)
        for number in range(3):
            await mesh.generate(request([*FIRST, number + 1, 7]))
        for number in range(2):
            await mesh.generate(request([*SECOND, number + 1, 7]))
        yield mesh


@asynccontextmanager
async def joining(mesh: Mesh, cold: ColdWorker) -> AsyncIterator[None]:
    """A worker that the router finds, and what it tells it; it has ended when this has."""
    await cold.start()
    try:
        mesh.router.core.fleet._add(cold.address, static=True)
        key = (cold.address, cold.epoch)
        await eventually(lambda: key in mesh.router.warming._seen and not mesh.router.warming._tasks)
        yield
    finally:
        await cold.kill()


async def test_it_is_told_the_hottest_prefix_first_and_who_has_it(mesh: Mesh) -> None:
    cold = ColdWorker("d2", (DECODE,))
    async with joining(mesh, cold):
        assert cold.prefixes == [FIRST, SECOND]
        for asked in cold.asked:
            assert (asked.epoch, asked.holder_address, asked.holder_epoch) == (cold.epoch, mesh["d0"].address, mesh["d0"].epoch)
        index = mesh.router.core.prefixes
        [first, second] = index.recent.hottest(block_kind(cold.info()), 100, 0.0)
        assert index.holders(first.names)[cold.address, cold.epoch] == 3
        assert index.holders(second.names)[cold.address, cold.epoch] == 2


async def test_it_is_told_no_more_than_it_takes(mesh: Mesh) -> None:
    cold = ColdWorker("d2", (DECODE,), warm_blocks=3)
    async with joining(mesh, cold):
        assert cold.prefixes == [FIRST]


@pytest.mark.parametrize("warm_blocks", [0])
async def test_one_that_takes_nothing_is_not_asked(mesh: Mesh, warm_blocks: int) -> None:
    cold = ColdWorker("d2", (DECODE,), warm_blocks=warm_blocks)
    async with joining(mesh, cold):
        assert not cold.asked


async def test_one_that_has_enough_is_asked_no_more(mesh: Mesh) -> None:
    cold = ColdWorker("d2", (DECODE,), answers=[lambda asked: worker_pb2.WarmPrefixResponse(num_tokens=SIZE, is_over=True)])
    async with joining(mesh, cold):
        assert cold.prefixes == [FIRST]


async def test_a_holder_from_which_nothing_comes_is_left_out(mesh: Mesh) -> None:
    cold = ColdWorker("d2", (DECODE,), answers=[lambda asked: worker_pb2.WarmPrefixResponse()])
    async with joining(mesh, cold):
        assert cold.prefixes == [FIRST] * warming.MAX_TRIES, "and with it the only one that has the second"


async def test_a_part_that_came_is_not_the_end(mesh: Mesh) -> None:
    part = worker_pb2.WarmPrefixResponse(num_tokens=SIZE, num_cached_tokens=SIZE)
    cold = ColdWorker("d2", (DECODE,), answers=[lambda asked: part, everything])
    async with joining(mesh, cold):
        assert cold.prefixes == [FIRST, FIRST, SECOND]


@pytest.mark.parametrize(
    ("error", "prefixes"),
    [
        (ResourceExhausted("another router warms it"), [FIRST, FIRST, SECOND]),
        (InvalidArgument("request", "no"), [FIRST, SECOND]),
        (Unimplemented("no"), [FIRST]),
        (Unavailable("for a moment"), [FIRST, FIRST, SECOND]),
    ],
)
async def test_a_refusal_says_whether_to_ask_again(mesh: Mesh, error: MeshError, prefixes: list[list[int]]) -> None:
    cold = ColdWorker("d2", (DECODE,), answers=[error, everything])
    async with joining(mesh, cold):
        assert cold.prefixes == prefixes


async def test_one_whose_calls_fail_is_asked_a_few_times(mesh: Mesh) -> None:
    cold = ColdWorker("d2", (DECODE,), answers=[Unavailable("it stops")])
    async with joining(mesh, cold):
        assert cold.prefixes == [FIRST] * warming.MAX_CALLS_FAILED


async def test_a_worker_that_came_before_the_first_prompt_is_warmed_when_there_are_some(tmp_path: Path) -> None:
    cold = ColdWorker("d1", (DECODE,), max_num_seqs=1)
    async with mesh_of(write_model(tmp_path), [StubWorker("d0", (DECODE, PREFILL)), cold]) as mesh:
        await eventually(lambda: (cold.address, cold.epoch) in mesh.router.warming._seen)
        cold.draining = True
        await eventually(lambda: len(mesh.router.core.fleet.views()) == 1)
        await mesh.generate(request([*FIRST, 1, 7]))
        assert mesh.router.warming._tasks and not cold.asked
        await mesh.generate(request([*FIRST, 2, 7]))
        await eventually(lambda: cold.prefixes == [FIRST])
        await eventually(lambda: not mesh.router.warming._tasks)


async def test_prompts_expire_also_where_no_more_come(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "EXPIRE_S", 0.01)
    monkeypatch.setattr(hot_prefixes, "KEPT_S", 0.0)
    expiring = warming.FleetWarming(mesh.router.core.fleet, mesh.router.core.prefixes)
    assert len(mesh.router.core.prefixes.recent)
    expiring.start()
    await eventually(lambda: not len(mesh.router.core.prefixes.recent))
    await expiring.stop()


async def test_a_holder_that_is_lost_is_not_named(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "YOUNG_S", 0.0)
    await mesh["d0"].kill()
    await eventually(lambda: not mesh.router.core.fleet.views())
    cold = ColdWorker("d2", (DECODE,))
    async with joining(mesh, cold):
        assert not cold.asked


async def test_a_worker_of_another_layout_is_told_nothing(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "YOUNG_S", 0.0)

    class Other(ColdWorker):
        def info(self) -> worker_pb2.WorkerInfo:
            info = super().info()
            info.layout.block_size = 2 * SIZE
            return info

    cold = Other("d2", (DECODE,))
    async with joining(mesh, cold):
        assert not cold.asked


async def test_one_is_told_once_and_its_next_process_again(mesh: Mesh) -> None:
    cold = ColdWorker("d2", (DECODE,))
    async with joining(mesh, cold):
        mesh.router.warming.listed(mesh.router.core.fleet.workers[cold.address], cold.info())
        assert not mesh.router.warming._tasks
    again = ColdWorker("d2", (DECODE,), port=cold.port, epoch=cold.epoch + 1)
    async with joining(mesh, again):
        assert again.prefixes == [FIRST, SECOND]


def of_session(session_id: str, number: int, **options: object) -> mesh_pb2.GenerateRequest:
    message = request([*THIRD, number, 7])
    message.options.MergeFrom(mesh_pb2.RequestOptions(session_id=session_id, **options))  # type: ignore[arg-type]
    return message


async def test_the_prompts_of_a_session_are_forgotten_when_it_ends(mesh: Mesh) -> None:
    recent = mesh.router.core.prefixes.recent
    num_before = len(recent)
    await mesh.generate(of_session("s", 1))
    await mesh.generate(of_session("another", 2))
    assert len(recent) == num_before + 2
    await mesh.stub.ReleaseSession(mesh_pb2.ReleaseSessionRequest(session_id="another"))
    assert len(recent) == num_before + 1
    await mesh.generate(of_session("s", 3, session_final=True))
    await eventually(lambda: len(recent) == num_before)
