"""What is sent when: every block of every layer once, none before it is final, groups of layers as links and steps have it."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.manifest import Part
from kvtransfer.sender.send_queue import GROUP_COST_S, KVReadiness, Pipeline, Ready, choose_group

SIZE = 512


def cells(parts: list[Part]) -> Counter[tuple[int, int]]:
    return Counter((layer, block) for p in parts for layer in p.layers for block in range(p.block_start, p.block_end))


@st.composite
def prefills(draw: st.DrawFn) -> tuple[int, int, int, list[Ready]]:
    """(layers, first block that is wanted, blocks, what becomes final in which order): a cached prefix, then steps."""
    num_layers, num_blocks = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    ends = sorted({*draw(st.lists(st.integers(1, num_blocks), max_size=4)), num_blocks})
    begin, news = draw(st.integers(0, ends[0] - 1)), []
    for end in ends:
        seen = sorted(draw(st.sets(st.integers(0, num_layers), max_size=4)))
        news += [Ready(begin, end, layers) for layers in seen] + [Ready(end, end, num_layers)]
        begin = end
    return num_layers, draw(st.integers(0, num_blocks - 1)), num_blocks, news


@given(prefill=prefills(), group=st.integers(1, 10), target=st.sampled_from([1, 3000, 1 << 20]))
def test_everything_once_and_nothing_too_early(prefill: tuple[int, int, int, list[Ready]], group: int, target: int) -> None:
    num_layers, first_block, num_blocks, news = prefill
    pipeline, sent = Pipeline(num_layers, first_block, num_blocks, SIZE, target), list[Part]()
    for ready in news:
        parts = list(pipeline.take(ready, lambda _: group))
        for part in parts:
            is_final = part.block_end <= ready.num_blocks
            assert is_final or (part.block_end <= ready.num_step_blocks and part.layer_end <= ready.num_layers)
        sent += parts
    assert pipeline.is_complete
    assert pipeline.num_parts == len(sent)
    assert [part.part_id for part in sent] == list(range(len(sent)))
    wanted = ((layer, block) for layer in range(num_layers) for block in range(first_block, num_blocks))
    assert cells(sent) == Counter(wanted)


def test_layers_go_in_groups_while_the_step_runs() -> None:
    pipeline = Pipeline(10, 0, 4, SIZE)
    sent = [[(p.layer_start, p.layer_end) for p in pipeline.take(Ready(0, 4, layers), lambda _: 4)] for layers in range(11)]
    assert sent == [[], [], [], [], [(0, 4)], [], [], [], [(4, 8)], [], [(8, 10)]]


def test_what_is_left_after_the_last_layer_is_one_group() -> None:
    pipeline = Pipeline(30, 0, 64, SIZE)
    for layers in range(3, 30, 3):
        list(pipeline.take(Ready(0, 64, layers), lambda _: 3))
    assert sum(part.num_bytes(SIZE) for part in pipeline.take(Ready(64, 64, 30), lambda _: 3)) == 3 * 2 * 64 * SIZE


@pytest.mark.parametrize(
    ("transfer_s", "num_groups"), [(0, 1), (GROUP_COST_S, 1), (4 * GROUP_COST_S, 2), (25 * GROUP_COST_S, 5), (10.0, 30)]
)
def test_groups_cost_as_much_as_is_exposed(transfer_s: float, num_groups: int) -> None:
    layer_bytes = 1 << 20
    bytes_per_s = 30 * layer_bytes / transfer_s if transfer_s else 1e15
    assert choose_group(30, bytes_per_s, layer_bytes) == 30 // num_groups


async def test_a_feed_keeps_the_furthest_and_tells_of_news() -> None:
    feed = KVReadiness()
    assert not await feed.changed(0.01)
    feed.advance(Ready(0, 4, 3))
    assert await feed.changed(1)
    for late in (Ready(0, 4, 1), Ready(0, 4, 3), Ready(0, 2, 9)):
        feed.advance(late)
    assert not await feed.changed(0.01)
    assert feed.ready == Ready(0, 4, 3)
    waiting = asyncio.create_task(feed.changed(5))
    await asyncio.sleep(0.01)
    feed.advance(Ready(4, 8, 0))
    assert await waiting
    assert feed.ready == Ready(4, 8, 0)
