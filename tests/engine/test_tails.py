"""A drafted tree that is verified in one step: each node has the logits, to the last bit, that it has at the end of a chain, and
the branch that is kept leaves the pool as if it had been computed alone. Both backends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.kv_cache.moves import move_slots
from pdmesh.engine.runner.batch import Tail
from pdmesh.engine.speculation.draft import Draft
from tests.engine.backends import BACKENDS
from tests.engine.kernels.cpu.native_models import SHAPES, prompt
from tests.engine.paged_loop import Chunk, PagedLoop, load
from tests.engine.trees import Part, TreeStep, batch_of, drafts, verify
from tests.support.tiny_models import make_tiny_model

CASES: list[tuple[str, str, dict[str, object]]] = [
    ("llama-odd-groups", "torch", {"dtype": "float32", "block_size": 5}),
    ("mistral-window", "torch", {"dtype": "bfloat16"}),
    ("llama-odd-groups", "native", {"dtype": "float32", "kv_dtype": "float32"}),
    ("qwen2-window", "native", {"kv_dtype": "bfloat16", "block_size": 48, "num_threads": 2}),
    ("mistral-window", "native", {"kv_dtype": "int8", "num_threads": 2}),
    ("groups-7", "native", {"kv_dtype": "float32", "block_size": 32, "num_threads": 2}),
    ("head-dim-80", "native", {"kv_dtype": "int8", "block_size": 48}),
]
BORDERS = [1, 2, 14, 15, 16, 17, 31, 32, 33, 46, 47, 48, 95, 96, 112, 126, 127, 128, 129, 240, 254, 255, 256, 257]
# root ── a ── b ── c        and two of them below another first token
#          └─── d ── e
#      └── f ── g
KEPT = ((0, (5, 6)), (1, (0, 3, 4)), (20, ()))  # how early the tail begins, and the branch that is kept
BUSHY = Draft((11, 12, 13, 14, 15, 16, 17), (-1, 0, 1, 0, 3, -1, 5), (1.0,) * 7)


@dataclass
class Case:
    loop: PagedLoop
    expected: dict[tuple[int, ...], Tensor]

    def logits(self, token_ids: list[int]) -> Tensor:
        """[len(token_ids), vocab], as a chain by itself, in blocks of its own."""
        key = tuple(token_ids)
        if key not in self.expected:
            table = self.table(len(key))
            self.expected[key] = self.loop.step([Chunk(table, key, 0, every_row=True)])
            self.loop.release(table)
        return self.expected[key]

    def table(self, num_tokens: int) -> list[int]:
        """What lies in them is the worst that can."""
        table = self.loop.table(num_tokens)
        self.loop.pool.tensor.view(torch.uint8)[:, :, table] = 0xFF
        return table

    def begin(self, token_ids: list[int], draft: Draft, num_known: int = 1, early: int = 0) -> TreeStep:
        """All but the last `num_known` tokens are computed."""
        table, done = self.table(len(token_ids) + len(draft) + 4), len(token_ids) - num_known
        if done:
            self.loop.step([Chunk(table, token_ids[:done], 0)])
        return TreeStep(table, token_ids[done:], done, draft, early)

    def assert_as_chains(self, token_ids: list[int], step: TreeStep, logits: Tensor) -> None:
        known = len(step.token_ids)
        assert torch.equal(logits[:known], self.logits(token_ids)[-known:])
        for index in range(len(step.draft)):
            path = [step.draft.token_ids[i] for i in step.draft.branch(index)]
            assert torch.equal(logits[known + index], self.logits([*token_ids, *path])[-1]), (
                f"node {index} of {step.draft.parents}"
            )

    def keep(self, token_ids: list[int], step: TreeStep, path: tuple[int, ...]) -> list[int]:
        """Moves the branch to its places; the tokens that are then known."""
        size, start = self.loop.block_size, step.root + 1
        sources = [step.slot(start + node, size) for node in path]
        targets = [step.slot(start + depth, size) for depth in range(len(path))]
        native = "native" in self.loop.loaded.numeric_mode
        move_slots(self.loop.pool.tensor, sources, targets, "panels" if native else "plain")
        return [*token_ids, *(step.draft.token_ids[node] for node in path)]

    def assert_goes_on(self, token_ids: list[int], table: list[int]) -> None:
        """One token after the other, as far as the table reaches."""
        end = len(table) * self.loop.block_size
        more = prompt(min(end - len(token_ids), 20), 5)
        whole = self.logits([*token_ids, *more])
        for position in range(len(token_ids), len(token_ids) + len(more)):
            [row] = self.loop.step([Chunk(table, [more[position - len(token_ids)]], position)])
            assert torch.equal(row, whole[position]), f"position {position}"


@pytest.fixture(scope="module", params=[case for case in CASES if case[1] in BACKENDS], ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, backend, chosen = request.param
    kind, overrides = SHAPES[name]
    folder = make_tiny_model(tmp_path_factory.mktemp(name), kind, **overrides)
    return Case(loop_of(folder, backend=backend, **{"num_threads": 1, "block_size": 16, **chosen}), {})


def loop_of(folder: Path, **asked: object) -> PagedLoop:
    try:
        return PagedLoop(load(folder, **asked), num_blocks=600, block_size=asked["block_size"])  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("root", "kept"), [(root, KEPT[index % len(KEPT)]) for index, root in enumerate(BORDERS)], ids=str)
def test_a_tree_at_the_borders_of_groups_chunks_and_blocks(case: Case, root: int, kept: tuple[int, tuple[int, ...]]) -> None:
    (early, path), token_ids = kept, prompt(root)
    step = case.begin(token_ids, BUSHY, early=early)
    [logits] = verify(case.loop, [step])
    case.assert_as_chains(token_ids, step, logits)
    case.assert_goes_on(case.keep(token_ids, step, path), step.table)
    case.loop.release(step.table)


@given(st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_trees_of_several_sequences_in_company(case: Case, data: st.DataObject) -> None:
    asked, steps = [], []
    for seed in range(data.draw(st.integers(1, 4))):
        token_ids = prompt(data.draw(st.sampled_from(BORDERS)), seed % 2)
        num_known = data.draw(st.integers(1, min(3, len(token_ids))))
        asked.append(token_ids)
        steps.append(case.begin(token_ids, data.draw(drafts()), num_known, data.draw(st.integers(0, 3))))
    for token_ids, step, logits in zip(asked, steps, verify(case.loop, steps), strict=True):
        case.assert_as_chains(token_ids, step, logits)
    for token_ids, step in zip(asked, steps, strict=True):
        kept = data.draw(st.integers(-1, len(step.draft) - 1))
        case.assert_goes_on(case.keep(token_ids, step, step.draft.branch(kept)), step.table)
        case.loop.release(step.table)
    case.expected.clear()


def test_a_wide_tree(case: Case) -> None:
    """More branches than there are threads or rows of a tile, each of one node."""
    draft, token_ids = Draft(tuple(range(40)), (-1,) * 40, (0.01,) * 40), prompt(120)
    step = case.begin(token_ids, draft)
    [logits] = verify(case.loop, [step])
    case.assert_as_chains(token_ids, step, logits)
    case.assert_goes_on(case.keep(token_ids, step, (33,)), step.table)


@pytest.mark.parametrize("root", [3, 17, 28, 127, 200])
def test_branches_may_come_in_any_order(case: Case, root: int) -> None:
    """What a branch has written stays when the chain before it in the pool is written later."""
    token_ids = prompt(root)
    step = case.begin(token_ids, BUSHY)
    parts = step.parts(case.loop.block_size)[::-1]
    logits = case.loop.loaded.model.forward(batch_of(parts), case.loop.pool.tensor)
    rows = torch.split(logits, [len(part.token_ids) for part in parts])
    case.assert_as_chains(token_ids, step, torch.cat(rows[::-1]))
    case.assert_goes_on(case.keep(token_ids, step, (0, 3, 4)), step.table)
    case.loop.release(step.table)


def test_a_tail_that_begins_with_the_sequence(case: Case) -> None:
    """Of a branch's own block table nothing is needed then."""
    token_ids, size = prompt(20), case.loop.block_size
    table = case.table(60)
    slots = [table[i // size] * size + i % size for i in range(60)]
    scattered = slots[:18][::-1]
    first = Part(table, token_ids[:18], 0, scattered, Tail(0, scattered))
    second = Part([], token_ids[18:], 18, slots[40:42], Tail(0, [*scattered, *slots[40:42]]))
    rows = [case.loop.loaded.model.forward(batch_of([part]), case.loop.pool.tensor) for part in (first, second)]
    assert torch.equal(torch.cat(rows), case.logits(token_ids))


@pytest.mark.parametrize(
    ("index", "tail"),
    [(0, Tail(2, [5, 6])), (0, Tail(3, [])), (0, Tail(-1, [1, 2, 3, 4])), (1, Tail(1, [5, 6])), (-1, Tail(1, [5, 6]))],
)
def test_a_tail_that_is_not_the_end_of_its_context_is_refused(index: int, tail: Tail) -> None:
    batch = batch_of([Part([0], [1], 2, [2], Tail(2, [2]))])
    assert batch.tails
    with pytest.raises(ValueError, match=r"tails: .* for sequence"):
        type(batch)(**{**vars(batch), "tails": {index: tail}})
