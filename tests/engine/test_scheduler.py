"""Who computes what, in what order, with which blocks: the scheduler without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.kv_cache.block_manager import BlockCopy, BlockManager
from pdmesh.engine.kv_cache.block_pool import BlockPool
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.scheduler.scheduler import Scheduler, SchedulerOutput
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.engine.speculation.draft import Draft
from pdmesh.sampling_params import SamplingParams
from tests.support.mock_engine import hash_block

BLOCK_SIZE = 4


class Bench:
    """A scheduler and a hand that plays the model: every computed end draws token 9."""

    def __init__(self, *, num_blocks: int = 16, budget: int = 64) -> None:
        self.pool = BlockPool(num_blocks)
        self.allocator = BlockManager(self.pool, BLOCK_SIZE, hash_block, prefix_caching=True)
        self.scheduler = Scheduler(self.allocator, budget)
        self.num_arrived = 0
        self.reserved: list[int] = []

    def add(self, prompt: Iterable[int], n: int = 1, emitted: tuple[tuple[int, ...], ...] = ()) -> Sequence:
        request = EngineRequest(str(self.num_arrived), tuple(prompt), SamplingParams(max_tokens=99, n=n), emitted)
        group = SequenceGroup(request, self.num_arrived, Phase.ACTIVE)
        self.num_arrived += 1
        self.scheduler.wait(group.sequences[0])
        return group.sequences[0]

    def step(self, guess: Sequence | None = None, num_guessed: int = 8) -> dict[Sequence, int]:
        """`guess`: so many tokens are guessed of this sequence, none of them right."""
        draft = Draft.chain([1] * num_guessed, [1.0] * num_guessed, "test")
        plan = self.scheduler.schedule(drafts={guess: draft} if guess else {})
        for piece in plan.pieces:
            piece.sequence.num_computed += piece.num_tokens
            self.allocator.publish(piece.sequence)
            if not piece.sequence.num_remaining:
                piece.sequence.output.append(9)
        return tokens_of(plan)

    def check(self) -> None:
        """Every block is held as often as the scheduler's sequences hold it."""
        held = Counter(block_id for sequence in self.scheduler.running for block_id in sequence.block_ids)
        self.pool.check(held + Counter(self.reserved))

    def reserve(self, num_blocks: int) -> None:
        """Somebody else takes so many."""
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None
        self.reserved += blocks

    def part(self, trunk: Sequence) -> list[Sequence]:
        branches = self.allocator.part(trunk)
        self.scheduler.discard(trunk)
        for branch in branches:
            branch.output.append(9)
            self.scheduler.run(branch)
        return branches


def tokens_of(plan: SchedulerOutput) -> dict[Sequence, int]:
    return {piece.sequence: piece.num_tokens for piece in plan.pieces}


def test_decode_rows_come_before_chunks_and_chunks_in_order_of_arrival() -> None:
    bench = Bench(budget=6)
    a, b, c = bench.add(range(3)), bench.add(range(10, 19)), bench.add(range(20, 25))
    assert bench.step() == {a: 3, b: 3}
    assert list(bench.step().items()) == [(a, 1), (b, 5)]
    assert list(bench.step().items()) == [(a, 1), (b, 1), (c, 4)]
    assert list(bench.step().items()) == [(a, 1), (b, 1), (c, 1)]


def test_a_much_shorter_prompt_shares_the_steps_of_the_oldest_one() -> None:
    bench = Bench(budget=8, num_blocks=64)
    long = bench.add(range(100, 200))
    assert bench.step() == {long: 8}
    short, middle = bench.add(range(2)), bench.add(range(20, 60))
    assert bench.step() == {short: 2, middle: 2, long: 4}, "half of the step is the oldest one's, the shortest other comes first"
    assert bench.step() == {short: 1, middle: 3, long: 4}


def test_prompts_of_like_lengths_are_computed_one_after_the_other() -> None:
    bench = Bench(budget=8, num_blocks=64)
    first, second = bench.add(range(100, 140)), bench.add(range(200, 230))
    steps = [bench.step() for _ in range(5)]
    assert steps == [{first: 8}] * 5
    assert bench.step() == {first: 1, second: 7}


def test_a_short_prompt_leaves_the_blocks_that_the_head_of_the_queue_needs() -> None:
    bench = Bench(num_blocks=12, budget=4)
    running = bench.add(range(8))
    assert [bench.step(), bench.step()] == [{running: 4}, {running: 4}]
    head, short = bench.add(range(20, 52)), bench.add(range(60, 62))
    assert bench.step() == {running: 1, head: 3}, "a block for the short one would leave too few for the head"
    assert bench.scheduler.waiting == [short]


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(2, 16),
    st.integers(16, 200),
)
def test_prompts_share_steps_fairly(arrivals: list[tuple[int, int]], budget: int, num_blocks: int) -> None:
    """No token of a step is left over, the oldest prompt has its half, and each prompt ends."""
    bench, coming, seen = Bench(budget=budget, num_blocks=num_blocks), sorted(arrivals), 0
    open_prompts: list[Sequence] = []
    for now in range(10_000):
        while coming and coming[0][0] <= now:
            seen += 100
            open_prompts.append(bench.add(range(seen, seen + coming.pop(0)[1])))
        oldest = open_prompts[0] if open_prompts else None
        lacks = oldest.num_remaining if oldest else 0
        planned = bench.step()
        bench.check()
        assert sum(planned.values()) <= budget
        if oldest is not None:
            assert planned[oldest] >= min(lacks, -(-budget // 2))
        if sum(planned.values()) < budget and bench.scheduler.waiting:
            head = bench.scheduler.waiting[0]
            assert bench.allocator.num_blocks_for(head.num_tokens) + bench.scheduler.num_spare_blocks(0) > bench.pool.num_free
        for prompt in [prompt for prompt in open_prompts if prompt.output]:
            open_prompts.remove(prompt)
            bench.scheduler.discard(prompt)
            bench.allocator.release(prompt)
        if not coming and not open_prompts:
            return
    raise AssertionError("a prompt never ended")


def test_a_waiting_sequence_gets_all_its_blocks_when_its_turn_comes() -> None:
    bench = Bench(budget=4)
    a = bench.add(range(9))
    bench.step()
    assert a.block_ids == [0, 1, 2]
    assert a.num_computed == 4


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    bench = Bench(num_blocks=4)
    a = bench.add(range(8))
    bench.step()
    large, small = bench.add(range(20, 32)), bench.add(range(40, 42))
    assert bench.step() == {a: 1}
    assert bench.scheduler.waiting == [large, small]


def test_admission_beside_running_sequences_leaves_a_spare_block() -> None:
    bench = Bench(num_blocks=4)
    a = bench.add(range(8))
    bench.step()
    b = bench.add(range(20, 28))
    assert bench.step() == {a: 1}, "two blocks would be free for b, but a is about to need one"
    assert bench.scheduler.waiting == [b]


def test_alone_a_sequence_may_take_the_last_block() -> None:
    bench = Bench(num_blocks=2)
    a = bench.add(range(8))
    assert bench.step() == {a: 8}


def test_the_latest_arrived_is_preempted_and_goes_to_the_head_of_the_queue() -> None:
    bench = Bench(num_blocks=5)
    a, b = bench.add(range(7)), bench.add(range(20, 27))
    assert bench.step() == {a: 7, b: 7}
    assert bench.step() == {a: 1, b: 1}
    c = bench.add(range(40, 41))
    assert bench.step() == {a: 1}, "both need a third block, one is there: b goes"
    assert bench.scheduler.waiting == [b, c]
    assert b.block_ids == []
    assert b.num_remaining == 9
    assert bench.scheduler.num_preemptions == 1


def test_a_victim_that_was_planned_already_leaves_the_plan_and_returns_its_budget() -> None:
    bench = Bench(num_blocks=6, budget=4)
    late = bench.add(range(20, 23))
    bench.step()
    late.group.arrival = 99  # as if its reservation had been granted later than the next request's
    early = bench.add(range(17))
    bench.allocator.admit(early, keep_free=0)
    bench.pool.release([early.block_ids.pop()])
    bench.scheduler.discard(early)
    bench.scheduler.run(early)
    early.num_computed = 16
    bench.pool.allocate(bench.pool.num_free)
    assert bench.step() == {early: 1}
    assert bench.scheduler.waiting == [late]


def test_a_sequence_that_is_the_latest_gives_way_itself() -> None:
    bench = Bench(num_blocks=4)
    a = bench.add(range(8))
    bench.step()
    taken = bench.pool.allocate(2)
    assert bench.step() == {}
    assert bench.scheduler.waiting == [a]
    bench.pool.release(taken or [])
    assert bench.step() == {a: 1}, "its two full blocks were still cached"


def test_who_waited_longer_takes_the_room_of_one_that_gave_way() -> None:
    """Else the step would have nothing to do, and no later call would wake the engine."""
    bench = Bench(num_blocks=4)
    waited = bench.add(range(20, 26))
    bench.scheduler.discard(waited)
    a = bench.add(range(8))
    bench.step()
    bench.pool.allocate(2)
    bench.scheduler.wait(waited)
    assert bench.step() == {waited: 6}
    assert bench.scheduler.waiting == [a]


def test_a_resumed_sequence_finds_its_own_prefix_but_computes_the_last_token() -> None:
    bench = Bench(num_blocks=8)
    a = bench.add(range(8))
    bench.step()
    bench.allocator.release(a)
    bench.scheduler.discard(a)
    a.was_preempted = True
    bench.scheduler.wait(a)
    assert bench.scheduler.blocks_for_preempted == 3
    assert bench.step() == {a: 1}
    assert a.num_cached == 8


def test_the_whole_prompt_is_never_served_from_the_cache() -> None:
    bench = Bench()
    bench.add(range(8))
    bench.step()
    b = bench.add(range(8))
    assert bench.step()[b] == 4
    assert b.block_ids[0] == 0
    assert b.num_cached == 4


def test_branches_copy_the_shared_partial_block_and_the_last_one_keeps_it() -> None:
    bench = Bench()
    trunk = bench.add(range(6), n=3)
    bench.scheduler.schedule()
    trunk.num_computed = 6
    branches = bench.part(trunk)
    assert [branch.block_ids for branch in branches] == [[0, 1]] * 3
    plan = bench.scheduler.schedule()
    assert [piece.copies for piece in plan.pieces] == [(BlockCopy(1, 2),), (BlockCopy(1, 3),), ()]
    assert [branch.block_ids for branch in branches] == [[0, 2], [0, 3], [0, 1]]
    assert bench.pool.ref_count(0) == 3


def test_branches_behind_full_blocks_copy_nothing() -> None:
    bench = Bench()
    trunk = bench.add(range(8), n=2)
    bench.scheduler.schedule()
    trunk.num_computed = 8
    branches = bench.part(trunk)
    assert [piece.copies for piece in bench.scheduler.schedule().pieces] == [(), ()]
    assert [branch.block_ids for branch in branches] == [[0, 1, 2], [0, 1, 3]]


def test_preempting_a_sibling_can_make_the_copy_needless() -> None:
    bench = Bench(num_blocks=2)
    trunk = bench.add(range(6), n=2)
    bench.scheduler.schedule()
    trunk.num_computed = 6
    first, second = bench.part(trunk)
    [piece] = bench.scheduler.schedule().pieces
    assert (piece.sequence, piece.copies) == (first, ())
    assert bench.scheduler.waiting == [second]


def test_preemption_drops_the_copies_into_blocks_that_the_victim_lost() -> None:
    bench = Bench(num_blocks=5)
    bench.allocator.admit(bench.add(range(100, 104)), keep_free=0)  # one block that somebody else holds
    bench.scheduler.waiting.clear()
    trunk = bench.add(range(7), n=2)
    bench.scheduler.schedule()
    trunk.num_computed = 7
    first, second = bench.part(trunk)
    first.output += [9] * 8  # as if it had history: it has two blocks to grow, and its turn is behind the decode row
    pieces = bench.scheduler.schedule().pieces
    assert [(piece.sequence, piece.copies) for piece in pieces] == [(first, ())]
    assert bench.scheduler.waiting == [second]
    assert bench.pool.num_free == 0


def test_history_of_a_single_choice_is_computed_with_the_prompt() -> None:
    bench = Bench()
    a = bench.add(range(6), emitted=((7, 8),))
    assert bench.step() == {a: 8}
    assert a.tokens(4, 9) == (4, 5, 7, 8, 9)


def guessing(num_blocks: int) -> tuple[Bench, Sequence, Sequence]:
    """Two sequences of five tokens, the first of which has three blocks: of its eight guesses none was right."""
    bench = Bench(num_blocks=num_blocks)
    a, b = bench.add(range(3)), bench.add(range(10, 13))
    bench.step()
    bench.step(guess=a)
    assert (a.num_tokens, b.num_tokens, len(a.block_ids), len(b.block_ids)) == (5, 5, 3, 1)
    return bench, a, b


def test_blocks_of_wrong_guesses_stay_while_nobody_lacks_one() -> None:
    bench, a, _ = guessing(num_blocks=8)
    held = list(a.block_ids)
    bench.step()
    assert a.block_ids == held


def test_blocks_of_wrong_guesses_go_before_anybody_is_preempted() -> None:
    bench, a, b = guessing(num_blocks=8)
    bench.reserve(4)
    surplus = a.block_ids[2]
    assert bench.step() == {a: 1, b: 1}
    assert bench.scheduler.num_preemptions == 0
    assert len(a.block_ids) == 2 and b.block_ids[1] == surplus
    bench.check()


def test_blocks_that_a_model_took_for_its_guesses_go_as_well() -> None:
    bench, a, b = guessing(num_blocks=8)
    assert bench.allocator.grow(a, 16)
    bench.reserve(3)
    assert bench.step() == {a: 1, b: 1}
    assert bench.scheduler.num_preemptions == 0
    assert len(a.block_ids) == len(b.block_ids) == 2
    bench.check()


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(6, False), (7, True)])
def test_a_prompt_waits_for_no_block_of_a_wrong_guess(num_blocks: int, is_admitted: bool) -> None:
    bench, a, b = guessing(num_blocks)
    c = bench.add(range(20, 25))
    assert bench.step() == ({a: 1, b: 1, c: 5} if is_admitted else {a: 1, b: 1})
    bench.check()


def test_who_lacks_a_block_takes_none_from_the_guesses_of_the_same_step() -> None:
    bench, a, b = guessing(num_blocks=8)
    c = bench.add(range(20, 28))
    assert bench.step(guess=a) == {a: 1, b: 1}
    assert len(a.block_ids) == 4
    assert bench.step() == {a: 1, b: 1, c: 8}
    bench.check()


def test_a_prompt_waits_for_blocks_that_another_computes() -> None:
    bench = Bench(num_blocks=64, budget=64)
    first, equal, other = bench.add(range(100)), bench.add(range(96)), bench.add(range(200, 210))
    assert bench.step() == {other: 10, first: 54}
    assert bench.step() == {other: 1, first: 46}, "there is room for `equal`, but what it lacks is computed in this step"
    assert bench.step() == {other: 1, first: 1, equal: 4}, "its last block is its own"
    bench.check()


def test_what_comes_behind_a_prompt_that_waits_for_another_one_does_not_wait() -> None:
    bench = Bench(num_blocks=64, budget=64)
    first, equal, later = bench.add(range(100)), bench.add(range(96)), bench.add(range(200, 260))
    assert bench.step() == {first: 64}
    assert bench.step() == {first: 36, later: 28}
    assert bench.scheduler.waiting == [equal]


def test_a_prompt_goes_on_where_it_parts_from_the_one_that_it_waited_for() -> None:
    bench = Bench(num_blocks=64, budget=64)
    first = bench.add(range(200))
    bench.step()
    parting = bench.add([*range(72), *range(300, 320)])
    assert bench.step() == {first: 64}, "blocks 16 and 17 are computed now"
    assert bench.step() == {first: 64}
    assert bench.step() == {first: 8, parting: 20}
    assert parting.num_cached == 72


@pytest.mark.parametrize("how", ["released", "preempted"])
def test_a_prompt_begins_when_the_one_that_it_waited_for_is_gone(how: str) -> None:
    bench = Bench(num_blocks=64, budget=64)
    first, equal = bench.add(range(100)), bench.add(range(96))
    assert bench.step() == {first: 64}
    bench.scheduler.discard(first)
    bench.allocator.release(first)
    if how == "preempted":
        bench.scheduler.wait(first)
        assert bench.step() == {first: 36}, "it is the first in the queue again"
    assert bench.step() == ({equal: 32} if how == "released" else {first: 1, equal: 4})
    bench.check()


def test_prompts_that_have_little_in_common_do_not_wait() -> None:
    bench = Bench(num_blocks=64, budget=128)
    first, equal = bench.add(range(60)), bench.add(range(60))
    assert bench.step() == {first: 60, equal: 60}


def test_a_running_prompt_shares_what_another_has_published_meanwhile() -> None:
    """One whose blocks were reserved before it began, as on a decode worker that computes it."""
    bench = Bench(num_blocks=64, budget=64)
    first, equal = bench.add(range(100)), bench.add(range(96))
    for sequence in (first, equal):
        bench.scheduler.discard(sequence)
        assert bench.allocator.admit(sequence, keep_free=0)
        bench.scheduler.run(sequence)
    before = bench.pool.num_free
    assert bench.step() == {first: 64}
    assert bench.step() == {first: 36}
    assert bench.step() == {first: 1, equal: 4}
    assert equal.block_ids[:23] == first.block_ids[:23]
    assert bench.pool.num_free == before - 1 + 23, "one is for the first one's output"
    bench.check()


def test_a_prompt_whose_blocks_a_push_reads_keeps_them() -> None:
    bench = Bench(num_blocks=64, budget=128)
    first, equal = bench.add(range(100)), bench.add(range(96))
    equal.group.request = replace(equal.group.request, prefill_only=True)
    for sequence in (first, equal):
        bench.scheduler.discard(sequence)
        assert bench.allocator.admit(sequence, keep_free=0)
        bench.scheduler.run(sequence)
    blocks = tuple(equal.block_ids)
    assert bench.step() == {first: 100, equal: 28}
    assert bench.step() == {first: 1, equal: 68}
    assert tuple(equal.block_ids)[:24] == blocks
    bench.check()
