"""KV that tiers have rounded: requests that use it say so, and no worker takes it for exact KV."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.tiers.settings import TierConfig
from kvtransfer.tiers.tiers import KVTiers
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import load_model
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import common_pb2, mesh_pb2
from router.config import RouterConfig
from tests.kvtransfer.tiers.blocks import files_in
from tests.mesh import oracle
from tests.router.mesh import Answer, Mesh, running_router
from tests.support.waiting import eventually
from tests.support.worker_mesh import Model, Peer, load_tiny, running_worker

BLOCK, NUM_TOKENS, MAX_TOKENS = 16, 100, 40
WHOLE = NUM_TOKENS // BLOCK
REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL
NO_TIERS = TierConfig()


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_tiny(tiny)


def native(folder: Path, kv_dtype: str) -> Model:
    """The element type of KV is one of what is loaded."""
    return Model(folder, load_model(EngineConfig(model=str(folder), num_blocks=128, backend="native", kv_dtype=kv_dtype)))


class Pair:
    """A prefill worker and a decode worker, each with tiers of its own, and a router in front of both."""

    def __init__(self, mesh: Mesh, prefill: Peer, decode: Peer) -> None:
        self.mesh, self.prefill, self.decode = mesh, prefill, decode

    async def answer(self, prompt: Sequence[int], mode: mesh_pb2.PrefillMode.ValueType = REMOTE, salt: str = "") -> Answer:
        wanted = common_pb2.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        options = mesh_pb2.RequestOptions(mode=mode, cache_salt=salt)
        request = mesh_pb2.GenerateRequest(tokens=mesh_pb2.TokenIds(ids=prompt), sampling=wanted, options=options)
        return await self.mesh.generate(request)


@asynccontextmanager
async def running_pair(
    model: Model, tiny: Path, prefill: TierConfig, decode: TierConfig = NO_TIERS, kv_pull: str = "off", backend: str = "torch"
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(
                running_worker(
                    model,
                    engine={"backend": backend},
                    roles=(role,),
                    worker_id=role,
                    kv_pull=kv_pull,
                    tiers=tiers,
                    transports=("tcp",),
                )
            )
            for role, tiers in (("prefill", prefill), ("decode", decode))
        ]
        workers = tuple(peer.info.address for peer in peers)
        config = RouterConfig(port=0, models=(f"tiny={tiny}",), workers=workers, drain_grace_s=0.3, linger_s=0.0, hedge_share=0.0)
        router, stub = await stack.enter_async_context(running_router(config))
        await eventually(router.core.fleet.ready)
        yield Pair(Mesh(router, stub, {}), *peers)


def tiers_of(peer: Peer) -> KVTiers:
    found = peer.worker.tiers
    assert found is not None
    return found


async def written(peer: Peer, num_blocks: int = WHOLE) -> None:
    await eventually(lambda: tiers_of(peer).tiers[-1].num_blocks >= num_blocks)


def on_disk(folder: Path, tier_dtype: str, **settings: Any) -> TierConfig:
    return TierConfig(kv_disk=str(folder), kv_restore="always", kv_tier_dtype=tier_dtype, **settings)


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


def num_shareable(peer: Peer, prompt: Sequence[int], root: bytes) -> int:
    """How many blocks of a prompt a worker would send to another one."""
    _, hashes = peer.engine.sharing.lacking(root, prompt)
    try:
        return len(peer.engine.sharing.pin("test", hashes))
    finally:
        peer.engine.sharing.unpin("test")


def root_of(peer: Peer) -> bytes:
    [root] = {name.root for name in tiers_of(peer).told}
    return root


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
async def test_a_request_says_how_many_of_its_tokens_have_rounded_kv(
    model: Model, tiny: Path, tmp_path: Path, tier_dtype: str, compression: str
) -> None:
    prompt, tiers = oracle.prompt_of(1, NUM_TOKENS), on_disk(tmp_path, tier_dtype, kv_tier_compression=compression)
    async with running_pair(model, tiny, tiers) as pair:
        first = await pair.answer(prompt)
        assert (first.timings.restored_tokens, first.timings.rounded_tokens) == (0, 0)
        await written(pair.prefill)
        again = await pair.answer(prompt)  # its own pool has what it computed: exact
        assert again.tokens() == first.tokens() and again.timings.rounded_tokens == 0
    async with running_pair(model, tiny, tiers) as pair:
        restored = await pair.answer(prompt)
        assert (restored.timings.restored_tokens, restored.timings.rounded_tokens) == (WHOLE * BLOCK, WHOLE * BLOCK)
        assert len(restored.tokens()) == MAX_TOKENS
        found = await pair.answer(prompt)  # in the pool, where the request before has left it
        assert (found.timings.restored_tokens, found.timings.rounded_tokens) == (0, WHOLE * BLOCK)
        counts = tiers_of(pair.prefill).counts
        assert counts.num_rounded_tokens == counts.num_tokens == WHOLE * BLOCK


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
async def test_kv_of_the_native_kernels_is_rounded_as_well(tiny: Path, tmp_path: Path, tier_dtype: str, kv_dtype: str) -> None:
    prompt, tiers, model = oracle.prompt_of(1, NUM_TOKENS), on_disk(tmp_path, tier_dtype), native(tiny, kv_dtype)
    async with running_pair(model, tiny, tiers, backend="native") as pair:
        layout = pair.prefill.info.layout
        assert (layout.arrangement, layout.kv_dtype) == ("panels", kv_dtype)
        await pair.answer(prompt)
        await written(pair.prefill)
    async with running_pair(model, tiny, tiers, backend="native") as pair:
        answer = await pair.answer(prompt)
        assert len(answer.tokens()) == MAX_TOKENS and answer.timings.rounded_tokens == WHOLE * BLOCK


async def test_a_request_that_the_decode_worker_computes_says_it_too(model: Model, tiny: Path, tmp_path: Path) -> None:
    prompt, tiers = oracle.prompt_of(1, NUM_TOKENS), on_disk(tmp_path, "int8")
    async with running_pair(model, tiny, NO_TIERS, tiers) as pair:
        await pair.answer(prompt, LOCAL)
        await written(pair.decode)
    async with running_pair(model, tiny, NO_TIERS, tiers) as pair:
        assert (await pair.answer(prompt, LOCAL)).timings.rounded_tokens == WHOLE * BLOCK
        remote = await pair.answer(prompt, REMOTE)  # computed exactly elsewhere, decoded behind what is here
        assert remote.timings.prefill_cached_tokens == 0
        assert remote.timings.decode_cached_tokens == remote.timings.rounded_tokens == WHOLE * BLOCK


@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
async def test_files_take_half_of_the_room_and_damage_is_found(model: Model, tiny: Path, tmp_path: Path, tier_dtype: str) -> None:
    prompt = oracle.prompt_of(1, NUM_TOKENS)
    for name in ("pool", tier_dtype):
        async with running_pair(model, tiny, on_disk(tmp_path / name, name)) as pair:
            right = await pair.answer(prompt)
            await written(pair.prefill)
            pool_bytes = pair.prefill.engine.kv.shape.dtype.itemsize
    assert file_bytes(tmp_path / tier_dtype) < file_bytes(tmp_path / "pool") * (1.5 / pool_bytes)
    for path in files_in(tmp_path / tier_dtype):
        content = bytearray(path.read_bytes())
        content[-9] ^= 4
        path.write_bytes(content)
    async with running_pair(model, tiny, on_disk(tmp_path / tier_dtype, tier_dtype)) as pair:
        answer = await pair.answer(prompt)
        assert answer.tokens() == right.tokens()
        assert (answer.timings.restored_tokens, answer.timings.rounded_tokens) == (0, 0)
        assert tiers_of(pair.prefill).tiers[0].counts.num_corrupt == WHOLE  # read together


async def test_workers_with_other_roundings_read_nothing_of_each_other(model: Model, tiny: Path, tmp_path: Path) -> None:
    """On a disk that they share. Each finds its own again."""
    prompt = oracle.prompt_of(1, NUM_TOKENS)
    for restored in (0, WHOLE * BLOCK):
        for tier_dtype in ("pool", "int8", "fp8"):
            async with running_pair(model, tiny, on_disk(tmp_path, tier_dtype)) as pair:
                timings = (await pair.answer(prompt)).timings
                assert timings.restored_tokens == restored
                assert timings.rounded_tokens == (restored if tier_dtype != "pool" else 0)
                await written(pair.prefill)
    assert len({path.parent.parent for path in files_in(tmp_path)}) == 3


async def test_a_store_keeps_them_apart_as_well(model: Model, tiny: Path) -> None:
    prompt = oracle.prompt_of(1, NUM_TOKENS)
    async with EmbeddedRedis() as server:
        for tier_dtype, restored in (("int8", 0), ("pool", 0), ("int8", WHOLE * BLOCK)):
            tiers = TierConfig(kv_store=server.url, kv_restore="always", kv_tier_dtype=tier_dtype)
            async with running_pair(model, tiny, tiers) as pair:
                assert (await pair.answer(prompt)).timings.rounded_tokens == restored
                await written(pair.prefill)


async def test_what_is_not_exact_is_sent_to_no_other_worker(model: Model, tiny: Path, tmp_path: Path) -> None:
    """Neither what was restored, nor what was computed behind it; what was computed from the beginning is."""
    prompt, tiers = oracle.prompt_of(1, NUM_TOKENS), on_disk(tmp_path, "int8")
    longer = [*prompt[: WHOLE * BLOCK], *oracle.prompt_of(2, 64)]
    async with running_pair(model, tiny, tiers) as pair:
        await pair.answer(prompt)
        await written(pair.prefill)
        assert num_shareable(pair.prefill, prompt, root_of(pair.prefill)) == WHOLE
    async with running_pair(model, tiny, tiers) as pair:
        await pair.answer(longer)
        root = root_of(pair.prefill)
        here, hashes = pair.prefill.engine.sharing.lacking(root, longer)
        assert here == len(hashes) > WHOLE
        assert num_shareable(pair.prefill, longer, root) == 0
        pool = pair.prefill.engine._allocator.pool
        assert [pool.is_rounded(each) for each in hashes] == [True] * WHOLE + [False] * (here - WHOLE)
        assert not any(pool.is_exact(each) for each in hashes)
        other = oracle.prompt_of(3, NUM_TOKENS)
        assert (await pair.answer(other)).timings.rounded_tokens == 0
        assert num_shareable(pair.prefill, other, root) == WHOLE


async def test_a_decode_worker_uses_what_is_not_exact_for_that_request_alone(model: Model, tiny: Path, tmp_path: Path) -> None:
    prompt, tiers = oracle.prompt_of(1, NUM_TOKENS), on_disk(tmp_path, "int8")
    async with running_pair(model, tiny, tiers) as pair:
        right = await pair.answer(prompt)
        await written(pair.prefill)
        assert pair.decode.engine.stats().num_cached_blocks == (NUM_TOKENS + MAX_TOKENS - 1) // BLOCK
    async with running_pair(model, tiny, tiers) as pair:
        assert (await pair.answer(prompt)).timings.rounded_tokens == WHOLE * BLOCK
        assert pair.decode.engine.stats().num_cached_blocks == 0
        exact = await pair.answer(prompt, LOCAL)  # computed there, from the beginning
        assert exact.tokens() == right.tokens()
        assert (exact.timings.decode_cached_tokens, exact.timings.rounded_tokens) == (0, 0)


async def test_other_workers_fetch_nothing_that_is_not_exact(model: Model, tiny: Path, tmp_path: Path) -> None:
    """The decode worker has restored a prompt; the prefill worker, which fetches whatever it can, computes it."""
    prompt, tiers = oracle.prompt_of(1, NUM_TOKENS), on_disk(tmp_path, "int8")
    async with running_pair(model, tiny, NO_TIERS, tiers) as pair:
        right = await pair.answer(prompt, LOCAL)
        await written(pair.decode)
    async with running_pair(model, tiny, NO_TIERS, tiers, kv_pull="always") as pair:
        await pair.answer(prompt, LOCAL)
        longer = [*prompt, *right.tokens()]
        answer = await pair.answer(longer, REMOTE)
        assert answer.timings.prefill_worker == "prefill"
        assert (answer.timings.fetched_tokens, answer.timings.prefill_cached_tokens) == (0, 0)


@pytest.mark.parametrize("tier_dtype", ["int8", "fp8"])
async def test_a_pool_that_rounds_already_is_refused_by_flag(tiny: Path, tmp_path: Path, tier_dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-tier-dtype.*the pool's KV is in int8 already"):
        async with running_worker(native(tiny, "int8"), engine={"backend": "native"}, tiers=on_disk(tmp_path, tier_dtype)):
            raise AssertionError("it has started")


def test_the_default_rounds_nothing() -> None:
    [default] = [each.default for each in dataclasses.fields(TierConfig) if each.name == "kv_tier_dtype"]
    assert default == "pool" and not TierConfig().rounds
