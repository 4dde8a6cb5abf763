"""The log of a prefix cache with token ids: exact, bounded by the pool, and absent unless it is asked for."""

from __future__ import annotations

from contextlib import nullcontext

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.kv_cache.block_events import BlockEventLog, BlockEvents, stored_block
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block
from tests.support import mock_engine
from tests.support.mock_engine import Collector, make_engine, run_to_end

SAMPLING = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, seed=0)
REQUEST = EngineRequest("r", (1, 2), SAMPLING, cache_root=b"root", adapter=AdapterId("calm", "d" * 64))


class Reader:
    """Applies what it is told, and refuses what it knows already, or never knew."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def apply(self, events: BlockEvents | None) -> None:
        if events is None:
            return
        stored = {block.block_hash for block in events.stored}
        assert set(events.removed) <= self.blocks
        assert not stored & self.blocks
        self.blocks = self.blocks - set(events.removed) | stored


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "take"]), st.integers(0, 5))))
def test_a_reader_is_told_each_block_once(calls: list[tuple[str, int]]) -> None:
    log, reader = BlockEventLog(nullcontext()), Reader()
    for name, number in calls:
        block_hash = bytes([number])
        if name == "store":
            log.store(stored_block(REQUEST, block_hash, None, (1, 2)))
        elif name == "remove":
            log.remove(block_hash)
        else:
            reader.apply(log.take())
        assert log.pending == (set(log.blocks) != reader.blocks)
    events, blocks = log.take_all()
    reader.apply(events)
    assert reader.blocks == {block.block_hash for block in blocks} == set(log.blocks)
    assert log.take() is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=12))
def test_the_engine_tells_the_tokens_of_all_that_it_caches(workload: list[tuple[int, int, int]]) -> None:
    engine = make_engine(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=8, max_context=40)
    log, reader = engine.sharing.watch(), Reader()
    for number, (beginning, length, max_tokens) in enumerate(workload):
        prompt = tuple(4 + (beginning * 7 + place) % 20 for place in range(min(length, 14 - max_tokens)))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        engine.add(EngineRequest(f"r{number}", prompt, sampling, cache_root=bytes([beginning])))
        run_to_end(engine, Collector())
        reader.apply(log.take())
        assert reader.blocks == set(engine.published_blocks()[1])
        assert len(log.blocks) <= 8
        for block in log.blocks.values():
            parent = block.cache_root if block.parent is None else block.parent
            assert mock_engine.hash_block(parent, block.token_ids) == block.block_hash
    engine.kv.close()


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    engine = make_engine(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=8, max_context=40)
    engine.add(EngineRequest("r", (4, 5, 6, 7), SAMPLING))
    run_to_end(engine, Collector())
    assert engine.published_blocks()[1]
    assert engine._pool.events is None
    engine.kv.close()


def test_a_block_names_the_adapter_and_the_root_without_it() -> None:
    block = stored_block(REQUEST, b"h", b"p", (1, 2))
    assert (block.adapter, block.cache_root, block.parent, list(block.token_ids)) == ("calm", b"root", b"p", [1, 2])
    assert hash_block(REQUEST.block_root, block.token_ids) != hash_block(block.cache_root, block.token_ids)
