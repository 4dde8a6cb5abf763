"""What only the tiers of a worker have is restored there and fetched by another one, as if both had one disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvtransfer.tiers.settings import TierConfig
from pdmesh.v1 import common_pb2, prefill_pb2, worker_pb2
from router.config import RouterConfig
from router.tokenization.prepared_request import scoped_salt
from tests.mesh import oracle
from tests.mesh.test_kv_pull import BLOCK, LOCAL, Pair, armed
from tests.router.mesh import Answer, Mesh, running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker

PROMPT = oracle.prompt_of(1, 150)
KNOWN = 150 // BLOCK * BLOCK


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_tiny(tiny)


@asynccontextmanager
async def running_pair(model: Model, tiny: Path, folder: Path, **settings: Any) -> AsyncIterator[Pair]:
    """A prefill worker without tiers that always fetches, and a decode worker with a disk of its own."""
    disk = TierConfig(kv_disk=str(folder), **{"kv_restore": "always", **settings})
    async with AsyncExitStack() as stack:
        fetching = running_worker(model, roles=("prefill",), worker_id="prefill", kv_pull="always", transports=("tcp",))
        holding = running_worker(model, roles=("decode",), worker_id="decode", tiers=disk, kv_pull="off", transports=("tcp",))
        prefill, decode = await stack.enter_async_context(fetching), await stack.enter_async_context(holding)
        workers = (prefill.info.address, decode.info.address)
        config = RouterConfig(port=0, models=(f"tiny={tiny}",), workers=workers, drain_grace_s=0.3, linger_s=0.0, hedge_share=0.0)
        router, stub = await stack.enter_async_context(running_router(config))
        await eventually(router.core.fleet.ready)
        followed = router.follower._followed
        await eventually(lambda: len(followed) == 2 and all(each.position is not None for each in followed.values()))
        yield Pair(Mesh(router, stub, {}), prefill, decode)


@pytest.fixture
async def first(model: Model, tiny: Path, tmp_path: Path) -> Answer:
    """The answer of a worker that has ended since: its disk has the prompt."""
    async with running_pair(model, tiny, tmp_path) as pair:
        answer = await pair.answer(PROMPT, LOCAL)
        await eventually(lambda: tiers_of(pair.decode) >= KNOWN // BLOCK)
    return answer


def tiers_of(peer: Peer) -> int:
    assert peer.worker.tiers is not None
    return len(peer.worker.tiers.held)


def num_restored(peer: Peer) -> int:
    assert peer.worker.tiers is not None
    return peer.worker.tiers.counts.num_tokens


async def test_a_worker_fetches_what_only_the_disk_of_another_one_has(
    model: Model, tiny: Path, tmp_path: Path, first: Answer
) -> None:
    async with running_pair(model, tiny, tmp_path) as pair:
        assert pair.decode.engine.stats().num_cached_blocks == 0
        answer = await pair.answer(PROMPT)
        assert pair.counts == (KNOWN, 0)
        assert num_restored(pair.decode) == KNOWN
        assert pair.num_prefilled == len(PROMPT) - KNOWN
        assert answer.tokens() == first.tokens()


def damage(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > 200:
            data = bytearray(file.read_bytes())
            data[-40] ^= 1
            file.write_bytes(data)


async def test_what_the_holder_does_not_restore_is_computed(model: Model, tiny: Path, tmp_path: Path, first: Answer) -> None:
    async with running_pair(model, tiny, tmp_path, kv_restore="off") as pair:
        assert pair.decode.info.restore_token_s == 0 and pair.decode.info.private_tiers
        answer = await pair.answer(PROMPT)
        assert num_restored(pair.decode) == 0
        assert pair.counts == (0, 0), "it is not asked"
        assert pair.num_prefilled == len(PROMPT)
        assert answer.tokens() == first.tokens()


async def test_nobody_asks_for_what_a_tier_has_rounded(model: Model, tiny: Path, tmp_path: Path) -> None:
    """Exact blocks are sent alone: a restore there would be for nothing."""
    async with running_pair(model, tiny, tmp_path, kv_tier_dtype="int8") as pair:
        first = await pair.answer(PROMPT, LOCAL)
        await eventually(lambda: tiers_of(pair.decode) >= KNOWN // BLOCK)
    async with running_pair(model, tiny, tmp_path, kv_tier_dtype="int8") as pair:
        assert pair.decode.info.restore_token_s > 0 and pair.decode.info.private_tiers
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # a router of an earlier version names it
            await pair.decode.control.SendBlocks(asking(pair.decode, PROMPT[:KNOWN]))
        assert (caught.value.code(), num_restored(pair.decode)) == (grpc.StatusCode.NOT_FOUND, 0)
        answer = await pair.answer(PROMPT)
        assert (pair.counts, num_restored(pair.decode)) == ((0, 0), 0)
        assert pair.num_prefilled == len(PROMPT)
        assert answer.tokens() == first.tokens()


async def test_a_disk_that_breaks_off_costs_a_computation(model: Model, tiny: Path, tmp_path: Path, first: Answer) -> None:
    """Its files are damaged: none of them is used."""
    damage(tmp_path)
    async with running_pair(model, tiny, tmp_path) as pair:
        answer = await pair.answer(PROMPT)
        assert pair.counts[0] == 0
        assert pair.num_prefilled == len(PROMPT)
        assert answer.tokens() == first.tokens()


async def test_a_pull_that_fails_behind_a_restore_is_computed(model: Model, tiny: Path, tmp_path: Path, first: Answer) -> None:
    async with running_pair(model, tiny, tmp_path) as pair:
        with armed("push.part=error@1"):
            answer = await pair.answer(PROMPT)
        assert pair.counts == (0, 1)
        assert num_restored(pair.decode) == KNOWN, "it is in its pool now, for whoever comes next"
        assert answer.tokens() == first.tokens()


Change = Callable[[worker_pb2.SendBlocksRequest], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda asked: asked.token_ids.pop(), "token_ids: "),
        (lambda asked: asked.ClearField("cache_root"), "cache_root: 0 bytes"),
        (lambda asked: setattr(asked, "cache_root", b"x" * 65), "cache_root: 65 bytes"),
        (lambda asked: setattr(asked, "cache_root", b"another"), "token_ids: with cache_root"),
        (lambda asked: asked.token_ids.__setitem__(3, 5), "token_ids: with cache_root"),
        (lambda asked: asked.hashes.__setitem__(0, b"x" * 16), "token_ids: with cache_root"),
        (lambda asked: asked.token_ids.__setitem__(0, 0xFFFFFFFF), "token_ids: with cache_root"),
        (lambda asked: setattr(asked.reservation, "num_cached_tokens", BLOCK), "token_ids: "),
    ],
)
async def test_tokens_that_are_not_those_of_the_blocks_are_refused(
    model: Model, tiny: Path, tmp_path: Path, change: Change, words: str
) -> None:
    async with running_pair(model, tiny, tmp_path) as pair:
        asked = asking(pair.decode, PROMPT[:KNOWN])
        change(asked)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.decode.control.SendBlocks(asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (caught.value.details() or "")
        await pair.decode.until_whole()


def asking(holder: Peer, tokens: Sequence[int]) -> worker_pb2.SendBlocksRequest:
    root = holder.worker._served_model.translate.cache_root("", scoped_salt("", ""))
    info = holder.info
    return worker_pb2.SendBlocksRequest(
        epoch=info.epoch,
        hashes=holder.engine._allocator.chain(root, tokens),
        identity=info.identity,
        reservation=common_pb2.Reservation(reservation_id=".1", epoch=1, attempt=1, token=b"x", layout=info.layout),
        token_ids=tokens,
        cache_root=root,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_tier_tokens": 65}, "holder.num_tier_tokens: 65"),
        ({"restore_token_s": -1.0}, "holder.restore_token_s: -1.0"),
        ({"restore_token_s": float("nan")}, "holder.restore_token_s: nan"),
    ],
)
async def test_a_holder_whose_tiers_cannot_be_is_refused(model: Model, changes: dict[str, float], words: str) -> None:
    async with running_worker(model, roles=("prefill",)) as worker:
        request = prefill_pb2.PrefillRequest(
            request_id="r",
            request=common_pb2.TokenRequest(
                model="tiny", prompt_token_ids=PROMPT, sampling=common_pb2.SamplingParams(max_tokens=1, seed=1)
            ),
            identity=worker.info.identity,
            reservation=common_pb2.Reservation(reservation_id="r.1", epoch=1, attempt=1, token=b"x", layout=worker.info.layout),
            holder=prefill_pb2.KVHolder(address="127.0.0.1:9", epoch=1, num_tokens=64, **changes),  # type: ignore[arg-type]
        )
        request.reservation.endpoints.add()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in worker.prefill.Prefill(request):
                pass
        assert (caught.value.code(), words in (caught.value.details() or "")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
