"""Adapters on the native kernels: a row's bits depend on its own adapter alone; sums, places and what is held are right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.lora.adapter import Adapter, AdapterMap, Site, sites_of
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderModel
from tests.engine.backends import needs_native
from tests.engine.kernels.cpu.native_models import SHAPES, native, prompt, reference
from tests.engine.kernels.cpu.schedules import PROMPTS, Run, runs, wanted
from tests.engine.lora.mixed import MixedLoop
from tests.engine.paged_loop import PagedLoop, make_batch
from tests.support.tiny_models import make_tiny_model

pytestmark = needs_native
# Of prompts 0 to 3: the first has no adapter. Ranks that fill no panel, one panel, several.
RANKS = (3, 16, 40)
STEMS = ("", "q_proj o_proj up_proj", "v_proj gate_proj down_proj")  # "": all


def adapter(config: ModelConfig, number: int, size: float = 0.1) -> Adapter:
    generator = torch.Generator().manual_seed(number)
    rank, stems = RANKS[number % 3], STEMS[number % 3]
    maps: dict[Site, AdapterMap] = {}
    for site, (outputs, inputs) in sites_of(config).items():
        a, b = torch.randn(rank, inputs, generator=generator) * size, torch.randn(outputs, rank, generator=generator) * size
        if not stems or site.stem.split(".")[1] in stems.split():
            maps[site] = AdapterMap(a, b)
    return Adapter(AdapterId(f"a{number}", str(number)), maps)


def put(loop: PagedLoop, slots: dict[int, int], size: float = 0.1) -> None:
    """Fill slots with adapters of these numbers."""
    assert loop.loaded.adapter_slots is not None
    for slot, number in slots.items():
        loop.loaded.adapter_slots.put(slot, adapter(loop.loaded.config, number, size))


def logits(loop: PagedLoop, token_ids: list[int], slot: int) -> Tensor:
    """All rows of one sequence, in one step."""
    return MixedLoop(loop.loaded, slots=[slot]).logits(token_ids)


@dataclass(frozen=True)
class Case:
    """Loops of 1, 2 and 3 threads with all adapters loaded, in these slots by prompt; what each prompt gives alone."""

    loops: list[PagedLoop]
    alone: list[Tensor]
    slots = (-1, 5, 0, 2)


SPECS = [
    ("llama-odd-groups", "float32"), ("hidden-72", "bfloat16"), ("qwen3", "int8"), ("llama-bias", "int4"),
    ("hidden-odd", "float32"),
]  # fmt: skip


@pytest.fixture(scope="module", params=SPECS, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, weights = request.param
    kind, overrides = SHAPES[name]
    folder = make_tiny_model(tmp_path_factory.mktemp(name), kind, **overrides)
    alone = [native(folder, weights).logits(PROMPTS[0])]
    for number in range(3):
        loop = native(folder, weights, max_loras=1)
        put(loop, {0: number})
        alone.append(logits(loop, PROMPTS[number + 1], 0))
        plain = logits(loop, PROMPTS[number + 1], -1)
        assert (alone[-1] - plain).abs().max() > 0.05, "an adapter that changes nothing shows nothing"
    loops = [native(folder, weights, max_loras=8, num_threads=threads, num_blocks=900) for threads in (1, 2, 3)]
    for loop in loops:
        put(loop, {slot: number for number, slot in enumerate(Case.slots[1:])} | {1: 7, 7: 8})
    return Case(loops, alone)


def play(loop: PagedLoop, slots: tuple[int, ...], schedule: list[Run], alone: list[Tensor]) -> None:
    """Run all of the schedule in company; every row must be that of the prompt alone with its adapter alone."""
    tables = [loop.table(sum(run.sizes)) for run in schedule]
    for step in range(max(run.first_step + len(run.sizes) for run in schedule)):
        both = [(run, run.chunk(table, step)) for run, table in zip(schedule, tables, strict=True)]
        present = [(run, chunk) for run, chunk in both if chunk is not None]
        if present:
            batch = make_batch([chunk for _, chunk in present], loop.block_size)
            batch = replace(batch, adapter_slots=tuple(slots[run.prompt] for run, _ in present))
            expected = torch.cat([wanted(chunk, alone[run.prompt]) for run, chunk in present])
            assert torch.equal(loop.loaded.model.forward(batch, loop.pool.tensor), expected), f"step {step}"
    for table in tables:
        loop.release(table)


@given(st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_bits_depend_neither_on_company_nor_on_chunks_nor_on_the_slot(case: Case, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 2, 3, 4, 5, 8, 13, 32]))
    schedule = data.draw(st.lists(runs(), min_size=count, max_size=count))
    for loop in case.loops:
        play(loop, case.slots, schedule, case.alone)


def test_decode_rows_of_four_adapters_beside_a_chunk_and_the_base(case: Case) -> None:
    """Rows of an adapter that are not neighbours, and a chunk of more rows than an item of a product has."""
    schedule = [Run(n % 4, 0, [20 + n, 1, 1, 1], "all") for n in range(8)] + [
        Run(1, 1, [130, 100], "last"),
        Run(0, 2, [97], "none"),
    ]
    for loop in case.loops:
        play(loop, case.slots, schedule, case.alone)


def test_slots_are_emptied_and_filled_again(tmp_path: Path) -> None:
    loop = native(make_tiny_model(tmp_path), max_loras=2)
    slots, token_ids = loop.loaded.adapter_slots, prompt(40)
    assert slots is not None
    put(loop, {0: 0, 1: 1})
    first, second = (logits(loop, token_ids, slot) for slot in (0, 1))
    assert not torch.equal(first, second)
    slots.drop(0)
    with pytest.raises(ValueError, match=r"adapter_slots: \[0\] hold no adapter"):
        logits(loop, token_ids, 0)
    assert torch.equal(logits(loop, token_ids, 1), second)
    put(loop, {0: 1})
    slots.drop(1)
    assert torch.equal(logits(loop, token_ids, 0), second)
    put(loop, {1: 0})
    assert torch.equal(logits(loop, token_ids, 1), first)


def test_a_model_without_places_refuses_a_batch_that_names_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter_slots: \[3\] hold no adapter"):
        logits(native(make_tiny_model(tmp_path)), prompt(4), 3)


def test_a_model_of_the_first_layers_computes_adapters(tmp_path: Path) -> None:
    """Also those that are loaded after it was made."""
    folder, found = make_tiny_model(tmp_path), []
    for loop in (native(folder, "float32", max_loras=2), reference(folder, max_loras=2)):
        model = loop.loaded.model
        assert isinstance(model, NativeModel | DecoderModel)
        first = PagedLoop(replace(loop.loaded, model=model.first_layers(1)))
        put(loop, {1: 0})
        found.append((logits(first, prompt(90), 1), logits(first, prompt(90), -1)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)
    assert not torch.equal(*found[0])


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_rounded_bases_stay_as_near_to_float32_as_they_are_without_an_adapter(weights: str, tmp_path: Path) -> None:
    folder, tokens = make_tiny_model(tmp_path, initializer_range=0.05), prompt(200)
    rounded, exact = native(folder, weights, max_loras=1), reference(folder, max_loras=1)
    for loop in (rounded, exact):
        put(loop, {0: 0}, 0.04)
    errors = [(logits(rounded, tokens, slot) - logits(exact, tokens, slot)).norm() for slot in (-1, 0)]
    changed = (logits(exact, tokens, 0) - logits(exact, tokens, -1)).norm()
    assert errors[1] < 1.5 * errors[0]
    assert errors[1] < 0.25 * changed


def test_maps_that_a_checkpoint_stores_as_one_share_their_a(tmp_path: Path) -> None:
    loop = native(make_tiny_model(tmp_path), "float32", max_loras=2)
    config, slots = loop.loaded.config, loop.loaded.adapter_slots
    a = torch.randn(16, config.hidden_size) * 0.1
    shapes = {site: shape for site, shape in sites_of(config).items() if site.stem in ("self_attn.q_proj", "self_attn.v_proj")}
    shared = {site: AdapterMap(a, torch.randn(outputs, 16) * 0.1) for site, (outputs, _) in shapes.items()}
    apart = {site: AdapterMap(each.a.clone(), each.b) for site, each in shared.items()}
    model = loop.loaded.model
    assert slots is not None and isinstance(model, NativeModel) and model.adapters is not None
    for slot, maps in enumerate((shared, apart)):
        slots.put(slot, Adapter(AdapterId("a", str(slot)), maps))
    assert [model.adapters.maps[slot][0].down.n for slot in (0, 1)] == [16, 32]
    assert torch.equal(logits(loop, prompt(30), 0), logits(loop, prompt(30), 1))
