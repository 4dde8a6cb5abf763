"""The measured hand-off of the GPU benchmark with memory of the host where a GPU's will be: real processes, no triton needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.handoff_ends import BLOCK_SIZE, Ends, ends_for, fingerprint
from benchmarks.gpu.parts.handoff import Other, Samples, SendingEnd, figures, receiving, size_words
from benchmarks.gpu.shapes import FULL, TINY
from kvtransfer.errors import PushFailed
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.pool import KVPool
from pdmesh.engine.loader.builder import TorchBuilder
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.memory import effective_max_context
from pdmesh.text.block_hash import hash_block
from tests.support.random_weights import RandomSource, engine_config

ENDS = replace(ends_for("cpu", TINY), num_blocks=4)


def test_blocks_make_a_gigabyte_of_8b() -> None:
    ends = ends_for("cuda", FULL)
    assert (ends.num_layers, ends.num_kv_heads, ends.head_dim, ends.dtype) == (32, 8, 128, "bfloat16")
    assert 1e9 <= ends.shape.num_bytes < 1e9 + ends.shape.bytes_per_block
    assert ends.num_tokens == 7632
    assert Ends.from_json(ends.to_json()) == ends
    assert [sizes.piece_bytes for sizes in ends.sizes()] == [16 << 20, 16 << 20]


def test_a_fingerprint_tells_other_content_and_another_order() -> None:
    pool = KVPool(ENDS.shape, shared=False)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    found = fingerprint(pool, [0, 1, 2])
    assert len(found) == ENDS.num_layers
    assert fingerprint(pool, [0, 2, 1]) != found
    pool.tensor[1, 1, 2, 3, 0, 1] += 1
    assert [a == b for a, b in zip(fingerprint(pool, [0, 1, 2]), found, strict=True)] == [True, False]
    pool.close()


SAMPLES = Samples(
    alone=[1.0, 2.0, 4.0],
    beside=[1.1, 2.2, 4.4],
    late_ns=[100_000_000, 0, 100_000_000],
    transfer=[2.0, 2.0, 8.0],
    num_bytes=10**9,
)


def test_what_is_not_hidden_is_a_share_of_the_transfer() -> None:
    assert SAMPLES.transfer_s == 2.0
    assert SAMPLES.slower == pytest.approx(0.1)
    assert SAMPLES.exposed == pytest.approx(0.2 / 2)  # of 0.2, 0.2 and 0.5 s
    assert SAMPLES.late_s == 0.1


def test_goals_are_those_of_the_transport_that_is_taken() -> None:
    best, other = (list(figures("tcp", SAMPLES, 1e12, is_best=each)) for each in (True, False))
    assert best[0].name == "hand-off of 1 GB of KV between two processes on the device, tcp"
    assert (best[0].value, best[0].unit, best[0].goal, best[0].limit) == (2000.0, "ms", 10.0, 2.0)
    assert [figure.goal for figure in best] == [10.0, None, 5.0, None, None]
    assert best[2].value == pytest.approx(10.0)
    assert {figure.goal for figure in other} == {None}
    assert size_words(30_720) == "30.7 KB"


def _engine() -> Engine:
    shape = TINY.config("8B")
    config = engine_config("cpu", max_num_seqs=1, max_context=ENDS.num_tokens + BLOCK_SIZE, max_num_batched_tokens=24)
    config = replace(config, backend="torch")
    builder = TorchBuilder(RandomSource(shape, "cpu", torch.float32), torch.float32, "cpu", None)
    model = builder.build(effective_max_context(config, shape), lambda _share, _text: None)
    loaded = LoadedModel(shape, model, "random weights", torch.float32, torch.float32, "as measured")
    return Engine(config, hash_block=hash_block, loaded=loaded)


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[SendingEnd, Other, list[str]]]:
    async with receiving(ENDS) as other:
        engine = _engine()
        end = SendingEnd(ENDS, engine)
        await end.start()
        try:
            yield end, other, end.transports((await other.read())["transports"])
        finally:
            await end.close()
            engine.close()


async def test_two_processes_hand_off_over_every_transport_that_both_offer() -> None:
    async with asyncio.timeout(120), two_ends() as (end, other, names):
        assert "tcp" in names and "shm" not in names  # nobody is shown a pool on a device
        seen = []
        for name in names:
            prefilled = await end.prefill()
            with pytest.raises(PushFailed, match="no transport that both ends offer"):
                await end.push_all(await other.reserve("carrier pigeon"))
            result = await end.push_all(await other.reserve(name))
            assert (result.transport, result.num_bytes, result.committed) == (name, ENDS.shape.num_bytes, True)
            assert result.num_parts > 2
            assert (await other.ask({"sums": True}))["sums"] == end.sums()
            seen.append(end.sums())
            await end.release()
            beside, late_ns = await end.prefill_and_push(await other.reserve(name))
            assert (await other.ask({"sums": True}))["sums"] == end.sums()
            seen.append(end.sums())
            await end.release()
            assert prefilled.seconds > 0 and beside.seconds > 0 and late_ns > 0
        assert len({tuple(each) for each in seen}) == 2 * len(names)  # each prompt is another one


async def test_a_receiver_that_ends_is_told_of() -> None:
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="ended with status"):
            async with receiving(replace(ENDS, dtype="none")) as other:
                await other.read()
