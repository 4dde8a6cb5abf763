"""LoRA adapters on the kernels: what a row gets depends on its own adapter alone, to the bit; and steps as graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.errors import AdapterRefused
from pdmesh.engine.kernels.triton.lora import AdapterGroups, AdapterRows, AdapterWeights
from pdmesh.engine.kernels.triton.metadata import NO_ADAPTER
from pdmesh.engine.kernels.triton.model import NODE_BYTES, TritonModel
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.lora.adapter import Adapter, AdapterMap, places_bytes, sites_of
from pdmesh.engine.lora.folder import with_lora_rank
from pdmesh.engine.lora.triton_maps import TritonAdapters
from pdmesh.engine.memory import DoesNotFit, check_adapters_fit
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.kernels.triton.test_step_memory import MEMORY
from tests.engine.lora.mixed import MixedLoop, generate
from tests.engine.paged_loop import Chunk, load
from tests.engine.test_model_transformers import prompt
from tests.support.mock_engine import Collector, hash_block, run_to_end
from tests.support.tiny_models import make_tiny_model

INPUTS, PARTS = 600, (70, 24, 24)  # two shares of the inputs, blocks of outputs that are cut off
RANKS: list[tuple[int, int, int]] = [(3, 3, 3), (16, 0, 5), (40, 8, 8), (1, 1, 1)]  # 0: the adapter has no such part


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def maps_of(number: int) -> list[tuple[Tensor, Tensor] | None]:
    """A and B of each part of the number-th adapter."""
    sizes = enumerate(zip(RANKS[number], PARTS, strict=True))
    return [(random(rank, INPUTS, seed=10 * number + n), random(out, rank, seed=n)) if rank else None for n, (rank, out) in sizes]


def weights_of(placed: dict[int, int], places: int = 5, room: int = 48, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    """Adapters by the slots that they lie in."""
    weights = AdapterWeights(places, room, INPUTS, PARTS, random(1, dtype=dtype))
    for slot, number in placed.items():
        weights.put(slot, maps_of(number))
    return weights


def groups_of(slots: Sequence[int], places: int) -> AdapterGroups:
    known = torch.tensor([NO_ADAPTER if slot < 0 else slot for slot in slots], dtype=torch.int32, device=DEVICE)
    groups = AdapterRows(places, torch.device(DEVICE)).groups_of(known)
    groups.sort()
    return groups


def added(weights: AdapterWeights, x: Tensor, slots: Sequence[int]) -> Tensor:
    """What rows get on top of ones."""
    y = torch.ones(len(x), sum(PARTS), dtype=x.dtype, device=DEVICE)
    weights.add(x, y, groups_of(slots, len(weights.ranks)))
    return y


def exact(x: Tensor, number: int) -> Tensor:
    parts = zip(maps_of(number), PARTS, strict=True)
    wide = x.double()
    return 1 + torch.cat(
        [torch.zeros(out, device=DEVICE) if m is None else m[1].double() @ (m[0].double() @ wide) for m, out in parts]
    )


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2.0**-19), (torch.bfloat16, 2.0**-7)])
def test_a_row_gets_its_own_adapters_product(dtype: torch.dtype, error: float) -> None:
    """More rows of one adapter than a tile has, others between them, and rows without."""
    slots = [0, -1, 3, 4, 1, *[3] * 18, -1, 0]
    x = random(len(slots), INPUTS, dtype=dtype)
    got = added(weights_of({0: 0, 1: 1, 3: 2, 4: 3}, dtype=dtype), x, slots)
    numbers = {0: 0, 1: 1, 3: 2, 4: 3}
    for row, slot in enumerate(slots):
        expected = exact(x[row], numbers[slot]) if slot >= 0 else torch.ones(sum(PARTS), dtype=torch.float64, device=DEVICE)
        most = error * float(expected.abs().max()) if slot >= 0 else 0.0
        torch.testing.assert_close(got[row].double().cpu(), expected.cpu(), atol=most, rtol=0)


def test_a_place_that_was_taken_again_adds_nothing_of_the_one_before() -> None:
    weights, x = weights_of({2: 2}), random(4, INPUTS)
    weights.drop(2)
    assert torch.equal(added(weights, x, [2] * 4), torch.ones(4, sum(PARTS), device=DEVICE))
    weights.put(2, maps_of(1))
    assert torch.equal(added(weights, x, [2] * 4), added(weights_of({2: 1}), x, [2] * 4))


@pytest.mark.parametrize("number", range(len(RANKS)))
def test_its_bits_depend_neither_on_other_rows_nor_on_slot_nor_on_room(number: int) -> None:
    x = random(1, INPUTS, seed=7)
    alone = added(weights_of({0: number}, places=1), x, [0])[0]
    others = [other for other in range(len(RANKS)) if other != number]
    weights = weights_of({0: others[0], 1: others[1], 2: others[2], 4: number}, room=64)
    rows, slots = random(23, INPUTS, seed=8), [(3 * row) % 6 - 1 for row in range(23)]
    slots = [slot if slot != 3 else 4 for slot in slots]
    rows[17], slots[17] = x[0], 4
    assert torch.equal(added(weights, rows, slots)[17], alone)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def adapter_of(loaded: LoadedModel, number: int, rank: int, only: str = "") -> Adapter:
    """A random adapter of all maps, or of those with a name in `only`."""
    maps = {
        site: AdapterMap(0.3 * random(rank, inputs, seed=number).cpu(), 0.3 * random(out, rank, seed=number + 1).cpu())
        for site, (out, inputs) in sites_of(loaded.config).items()
        if only in site.stem
    }
    return Adapter(AdapterId(f"a{number}", str(number)), maps)


def put(loaded: LoadedModel, adapters: dict[int, Adapter]) -> None:
    assert loaded.adapter_slots is not None
    for slot, adapter in adapters.items():
        loaded.adapter_slots.put(slot, adapter)


SIZES = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_context": 64, "max_loras": 3, "device": DEVICE}


@pytest.mark.timeout(300)
def test_mixed_steps_as_graphs_draw_the_references_tokens(folder: Path) -> None:
    """Prompts of a step are pieces, or wider than they are; then decode steps. The adapters change under recorded graphs."""
    torch_model, own = (load(folder, backend=name, dtype="float32", **SIZES) for name in ("torch", "triton"))
    assert isinstance(own.model, TritonModel) and own.model.recorder is not None
    prompts = [prompt(9, seed=1), prompt(4, seed=2), prompt(11, seed=3)]
    adapters = [adapter_of(own, 1, 8), adapter_of(own, 2, 20), adapter_of(own, 3, 1, "proj")]
    for loaded in (torch_model, own):
        put(loaded, {0: adapters[0], 2: adapters[1]})
    base = generate(torch_model, prompts, [], 4)
    expected = generate(torch_model, prompts, [0, -1, 2], 4)
    assert expected[1] == base[1] and expected[0] != base[0] and expected[2] != base[2]
    assert generate(own, prompts, [0, -1, 2], 4) == expected
    assert isinstance(own.adapter_slots, TritonAdapters)
    assert own.adapter_slots.rows.current is None, "a draft model has the same maps"
    assert generate(own, prompts, [], 4) == base, "a step without adapters"
    for loaded in (torch_model, own):
        assert loaded.adapter_slots is not None
        loaded.adapter_slots.drop(0)
        put(loaded, {0: adapters[2]})
    assert generate(own, prompts, [2, 0, 0], 4) == generate(torch_model, prompts, [2, 0, 0], 4) != expected


ENGINE: dict[str, Any] = {**SIZES, "max_loras": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.timeout(300)
def test_an_engine_runs_ahead_with_adapters(folder: Path) -> None:
    """Loaded and unloaded while requests run."""
    answers = []
    for backend in ("torch", "triton"):
        config = EngineConfig(model=str(folder), backend=backend, dtype="float32", num_blocks=32, **ENGINE)
        loaded, collector = load_model(config), Collector()
        engine = Engine(config, hash_block=hash_block, loaded=loaded)
        first, second = (adapter_of(loaded, number, rank) for number, rank in ((1, 8), (2, 3)))
        engine.adapters.load(first)
        for name, adapter in (("a", first.id), ("b", None)):
            assert engine.add(EngineRequest(name, tuple(prompt(5, seed=1)), GREEDY, adapter=adapter))
        for _ in range(3):
            collector.take(engine.step())
        assert engine.adapters.unload("a1") == 1
        engine.adapters.load(second)
        assert engine.add(EngineRequest("c", tuple(prompt(5, seed=1)), GREEDY, adapter=second.id))
        run_to_end(engine, collector)
        answers.append([collector.answer(name).token_ids for name in "abc"])
        assert [each.name for each in engine.adapters.loaded] == ["a2"]
        engine.close()
    assert answers[0] == answers[1] and len({*answers[0]}) == 3


def test_a_step_of_the_base_has_the_bits_of_a_model_without_places(folder: Path) -> None:
    plain, own = (load(folder, backend="triton", dtype="float32", **{**SIZES, "max_loras": n}) for n in (0, 3))
    assert plain.adapter_slots is None
    put(own, {1: adapter_of(own, 1, 8)})
    prompts = [prompt(5, seed=1), prompt(3, seed=2)]
    loops = [MixedLoop(plain, slots=[]), MixedLoop(own, slots=[-1, 1])]
    logits = [loop.step(chunks_of(loop, prompts))[0] for loop in loops]
    assert torch.equal(*logits)


def chunks_of(loop: MixedLoop, prompts: Sequence[list[int]]) -> list[Chunk]:
    return [Chunk(loop.table(len(each)), each, 0) for each in prompts]


def test_what_has_no_room_is_refused_and_changes_nothing(folder: Path) -> None:
    loaded = load(folder, backend="triton", dtype="float16", max_lora_rank=8, **SIZES)
    slots = loaded.adapter_slots
    assert isinstance(slots, TritonAdapters)
    with pytest.raises(AdapterRefused, match="'a1': rank 9, and this worker has room for 8; start it with --max-lora-rank 9"):
        slots.put(0, adapter_of(loaded, 1, 9))
    wide = adapter_of(loaded, 1, 4)
    next(iter(wide.maps.values())).b[0, 0] = 1e5
    with pytest.raises(AdapterRefused, match=r"layer 0, self_attn.o_proj: numbers beyond torch.float16's 65504"):
        slots.put(0, wide)
    assert all(int(each.weights.ranks.max()) == 0 for each in slots._maps)
    assert slots.num_bytes == places_bytes(loaded.config, 3, 16, 2)


def test_ranks_that_there_is_room_for(folder: Path) -> None:
    loaded = load(folder, backend="torch", dtype="float32", device=DEVICE)
    adapters = [adapter_of(loaded, 1, 8), adapter_of(loaded, 2, 100)]
    config = EngineConfig(model="m", max_loras=2)
    assert with_lora_rank(config, adapters).max_lora_rank == 100
    assert with_lora_rank(config, adapters[:1]).max_lora_rank == 64
    assert with_lora_rank(replace(config, max_lora_rank=8), adapters[:1]).max_lora_rank == 8
    with pytest.raises(ValueError, match="lora: a2: rank 100, and max_lora_rank is 99; raise it"):
        with_lora_rank(replace(config, max_lora_rank=99), adapters)
    with pytest.raises(ValueError, match="max_lora_rank: 257 is more than 256"):
        replace(config, max_lora_rank=257).validate()
    with pytest.raises(DoesNotFit, match="2 places for LoRA adapters of rank 8 need 6 MiB beside weights of 5 MiB"):
        check_adapters_fit(6 << 20, 5 << 20, 10 << 20, replace(config, max_lora_rank=8))


def test_steps_and_graphs_of_adapters_are_counted() -> None:
    own = replace(MEMORY, adapter_columns=100)
    assert own.activations(3) - MEMORY.activations(3) == 3 * 100 * 4
    plain, own = (replace(each, row_buckets=(4,)) for each in (MEMORY, own))
    outputs = 4 * (1000 * 4 + 64 * 2)
    assert own.graphs(64) - plain.graphs(64) == (11 + 8) * 3 * NODE_BYTES + outputs + 4 * 100 * 4
