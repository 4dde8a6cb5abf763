"""The log of a prefix cache: whoever applies it knows what the cache holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.kv_cache.block_pool import BlockLog, BlockPool
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.support.mock_engine import Collector, make_engine, run_to_end

CALLS = st.lists(
    st.tuples(st.sampled_from(["allocate", "release", "publish", "publish", "take", "list"]), st.integers(0, 9)), max_size=80
)


class Follower:
    """Believes what it is told, asks for everything when a number is missing."""

    def __init__(self, pool: BlockPool, log: BlockLog) -> None:
        self.pool, self.log = pool, log
        self.blocks: set[bytes] = set()
        self.sequence = 0

    def take(self) -> None:
        changes = self.log.take()
        if changes is None:
            return
        assert not set(changes.stored) & set(changes.evicted)
        if changes.sequence != self.sequence + 1:
            self.list()
            return
        self.sequence = changes.sequence
        self.blocks = (self.blocks | set(changes.stored)) - set(changes.evicted)

    def list(self) -> None:
        """As ListBlocks: changes that the log still holds come again, and change nothing."""
        self.blocks, self.sequence = set(self.pool.published()), self.log.sequence


@settings(max_examples=200, deadline=None)
@given(CALLS, st.integers(1, 6))
def test_applied_changes_are_the_cache_after_any_calls(calls: list[tuple[str, int]], max_changes: int) -> None:
    pool = BlockPool(5)
    pool.log = BlockLog(max_changes)
    follower = Follower(pool, pool.log)
    held: list[int] = []
    for name, argument in calls:
        if name == "allocate":
            held += pool.allocate(argument % 4) or []
        elif name == "take":
            follower.take()
        elif name == "list":
            follower.list()
        elif held and name == "release":
            pool.release([held.pop(argument % len(held))])
        elif held:
            pool.publish(held[argument % len(held)], bytes([argument]))
    follower.take()
    assert follower.blocks == set(pool.published())
    assert not pool.log.pending


def test_an_overflow_skips_a_number_and_forgets_what_it_had() -> None:
    log = BlockLog(2)
    log.note(b"a", stored=True)
    first = log.take()
    assert first is not None
    assert (first.sequence, first.stored, first.evicted) == (1, (b"a",), ())
    for block in (b"b", b"c", b"d"):
        log.note(block, stored=True)
    after_gap = log.take()
    assert after_gap is not None
    assert (after_gap.sequence, after_gap.stored) == (3, ())
    assert log.take() is None
    assert log.sequence == 3


def test_a_block_that_came_and_went_is_told_once() -> None:
    log = BlockLog(8)
    log.note(b"a", stored=True)
    log.note(b"a", stored=False)
    changes = log.take()
    assert changes is not None
    assert (changes.stored, changes.evicted) == ((), (b"a",))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=12))
def test_the_engine_tells_all_that_its_cache_gains_and_loses(workload: list[tuple[int, int, int]]) -> None:
    engine = make_engine(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=8, max_context=40)
    engine.watch_blocks(1000)
    told: set[bytes] = set()
    for number, (beginning, length, max_tokens) in enumerate(workload):
        prompt = tuple(4 + (beginning * 7 + place) % 20 for place in range(min(length, 14 - max_tokens)))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        engine.add(EngineRequest(f"r{number}", prompt, sampling))
        run_to_end(engine, Collector())
        changes = engine.take_block_changes()
        if changes is not None:
            assert changes.sequence == engine.published_blocks()[0]
            told = (told | set(changes.stored)) - set(changes.evicted)
        assert told == set(engine.published_blocks()[1])
    engine.kv.close()
