"""The maps of the torch backend: what a row gets depends on its own adapter alone, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.lora.adapter import Adapter, AdapterMap, Site
from pdmesh.engine.lora.torch_maps import AdaptedLinear, Part, StepRows
from pdmesh.engine.models.layers import make_linear, pad_rows
from pdmesh.engine.runner.batch import StepBatch

WIDTHS = {"q": 576, "k": 192, "v": 192}
INPUTS = 576
RANKS = (8, 16, 64, 3, 256, 16, 8, 1)


def adapter(number: int, rank: int, stems: Sequence[str] = "qkv") -> Adapter:
    generator = torch.Generator().manual_seed(number)
    maps = {
        Site(0, stem): AdapterMap(
            torch.randn(rank, INPUTS, generator=generator), torch.randn(WIDTHS[stem], rank, generator=generator)
        )
        for stem in stems
    }
    return Adapter(AdapterId(f"a{number}", str(number)), maps)


ADAPTERS = [adapter(number, rank) for number, rank in enumerate(RANKS)]


class Map:
    """A fused map of three parts with adapters in the given slots."""

    def __init__(self, loaded: dict[int, Adapter], dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(99)
        self.weight = torch.randn(sum(WIDTHS.values()), INPUTS, generator=generator).to(dtype)
        self.rows = StepRows()
        firsts = dict(zip(WIDTHS, (0, 576, 768), strict=True))
        parts = [Part(Site(0, stem), firsts[stem], count) for stem, count in WIDTHS.items()]
        self.map = AdaptedLinear(make_linear(self.weight), parts, sum(WIDTHS.values()), self.rows)
        for slot, each in loaded.items():
            self.map.put(slot, each, torch.device("cpu"))

    def __call__(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        self.rows.begin(batch_of(slots), torch.device("cpu"))
        return self.map(pad_rows(x))[: len(x)]


def batch_of(slots: Sequence[int]) -> StepBatch:
    """A batch of one row for each slot."""
    count, rows = len(slots), torch.arange(len(slots))
    return StepBatch(rows, rows, rows, list(range(count + 1)), [1] * count, [[0]] * count, rows, adapter_slots=tuple(slots))


def test_a_row_gets_its_own_adapters_product() -> None:
    mapped = Map(dict(enumerate(ADAPTERS)))
    x, slots = torch.randn(10, INPUTS), [3, 0, -1, 7, 7, 1, 2, -1, 4, 5]
    got = mapped(x, slots)
    for row, slot in enumerate(slots):
        expected = x[row].double() @ mapped.weight.double().t()
        if slot >= 0:
            own = ADAPTERS[slot].maps
            parts = [own[Site(0, stem)].b.double() @ (own[Site(0, stem)].a.double() @ x[row].double()) for stem in WIDTHS]
            expected = expected + torch.cat(parts)
        torch.testing.assert_close(got[row].double(), expected, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("number", range(len(RANKS)))
def test_its_bits_depend_neither_on_other_rows_nor_on_the_slot(number: int) -> None:
    own, x = ADAPTERS[number], torch.randn(1, INPUTS, generator=torch.Generator().manual_seed(number))
    alone = Map({0: own})(x, [0])
    others = [each for each in ADAPTERS if each is not own]
    for slot in (0, 3, 7):
        loaded = {other if other < slot else other + 1: each for other, each in enumerate(others)} | {slot: own}
        mapped = Map(loaded)
        for count in (1, 2, 4, 7, 8, 16, 33, 130):
            rows, slots = torch.randn(count, INPUTS), [(3 * row) % 9 - 1 for row in range(count)]
            place = count // 2
            rows[place], slots[place] = x[0], slot
            assert torch.equal(mapped(rows, slots)[place], alone[0]), (slot, count)


def test_rows_without_an_adapter_have_the_bits_of_the_model_alone() -> None:
    x = torch.randn(9, INPUTS)
    mapped, plain = Map(dict(enumerate(ADAPTERS))), Map({})
    alone = plain(x, [-1] * 9)
    assert torch.equal(mapped(x, [-1] * 9), alone)
    mixed = mapped(x, [-1, 2, -1, 3, -1, -1, 0, -1, -1])
    rows = [0, 2, 4, 5, 7, 8]
    assert torch.equal(mixed[rows], alone[rows])


def test_an_adapter_of_some_maps_leaves_the_others_alone() -> None:
    x = torch.randn(4, INPUTS)
    got = Map({5: adapter(1, 16, "qv")})(x, [5] * 4)
    alone = Map({})(x, [-1] * 4)
    assert torch.equal(got[:, 576:768], alone[:, 576:768])
    assert not torch.equal(got[:, :576], alone[:, :576]) and not torch.equal(got[:, 768:], alone[:, 768:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_round_once_more(dtype: torch.dtype) -> None:
    mapped = Map({0: ADAPTERS[0]}, dtype)
    x = torch.randn(4, INPUTS).to(dtype)
    own = ADAPTERS[0].maps
    added = torch.cat([own[Site(0, s)].b @ (own[Site(0, s)].a @ x.float().t()) for s in WIDTHS]).t()
    expected = (Map({}, dtype)(x, [-1] * 4).float() + added).to(dtype)
    torch.testing.assert_close(mapped(x, [0] * 4), expected, atol=0.5, rtol=1e-2)
    assert torch.equal(mapped(x, [0] * 4)[:2], mapped(x, [0, 0, -1, -1])[:2])


def test_few_rows_are_computed_alone() -> None:
    """One row of an adapter among many of the base's: the products get 4 rows, and the bits are the same."""
    mapped, x = Map({1: ADAPTERS[1]}), torch.randn(40, INPUTS)
    mapped.rows.begin(batch_of([-1] * 20 + [1] + [-1] * 19), torch.device("cpu"))
    [page] = mapped.map._pages
    rows, padded, foreign = mapped.rows.of(page)
    assert rows is not None and padded is not None
    assert (rows.tolist(), padded.tolist()) == ([20], [20, 0, 0, 0])
    assert foreign.any(1).tolist() == [False, True, True, True]
    assert torch.equal(mapped.map(x)[20], mapped(x, [1] * 40)[20])


def test_rows_of_chunks_and_padding() -> None:
    mapped, tokens = Map({0: ADAPTERS[0], 2: ADAPTERS[1]}), torch.arange(6)
    batch = StepBatch(tokens, tokens, tokens, [0, 3, 4, 6], [3, 1, 2], [[0]] * 3, tokens, adapter_slots=(2, -1, 0))
    mapped.rows.begin(batch, torch.device("cpu"))
    [page] = mapped.map._pages
    rows, _, foreign = mapped.rows.of(page)
    assert rows is None and mapped.rows.present == {0, 2}
    own = [set(page.owners[~row].tolist()) for row in foreign]
    assert own == [{2}, {2}, {2}, set(), {0}, {0}, set(), set()]
    mapped.rows.begin(batch_of([-1, -1]), torch.device("cpu"))
    assert not mapped.rows.present


def test_pages_are_filled_and_emptied() -> None:
    mapped, device = Map(dict(enumerate(ADAPTERS))), torch.device("cpu")
    assert [sum(width for _, width in page.layout) for page in mapped.map._pages] == [24 + 48 + 9 + 24 + 3, 192, 768, 48]
    x, slots = torch.randn(8, INPUTS), list(range(8))
    before = mapped(x, slots)
    for slot in (1, 4):
        mapped.map.drop(slot, device)
    left = [0, 2, 3, 5, 6, 7]
    assert torch.equal(mapped(x, slots)[left], before[left])
    assert torch.equal(mapped(x, slots)[[1, 4]], Map({})(x, [-1] * 8)[[1, 4]])
    for slot in (4, 1):
        mapped.map.put(slot, ADAPTERS[slot], device)
    assert torch.equal(mapped(x, slots), before)
