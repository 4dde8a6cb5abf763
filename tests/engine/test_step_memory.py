"""What a step holds besides weights and pool is counted before the pool is sized: compared with what a step was seen to hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pdmesh.adapter_id import AdapterId
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu.library import shared_library
from pdmesh.engine.kernels.cpu.step_memory import StepBuffers
from pdmesh.engine.lora.adapter import Adapter, AdapterMap, sites_of
from tests.engine.backends import needs_native
from tests.engine.lora.mixed import MixedLoop
from tests.engine.paged_loop import Chunk, PagedLoop, load
from tests.engine.test_model_transformers import prompt
from tests.support.tiny_families import make_tiny_family

pytest.importorskip("transformers")

TOKENS, SEQS = 256, 64
WIDE: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "initializer_range": 0.02}
# Dense and mixed, more contributions than inner states, a shared expert, a latent.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 1536},
    "mixtral": {"intermediate_size": 1536, "num_local_experts": 4, "num_experts_per_tok": 3},
    "qwen2_moe": {"moe_intermediate_size": 64, "num_experts_per_tok": 7, "shared_expert_intermediate_size": 1536},
    "deepseek_v3": {"kv_lora_rank": 48, "q_lora_rank": 32},
}


def step_of(loop: PagedLoop) -> Callable[[], Tensor]:
    """A full step: short prompts, and logits of as many sequences as run at once."""
    each = TOKENS // SEQS
    chunks = [Chunk(loop.table(each), prompt(each, seed), 0) for seed in range(SEQS)]
    return lambda: loop.step(chunks)


def counted(loop: PagedLoop) -> int:
    return loop.loaded.step_bytes(EngineConfig(model="m", max_num_batched_tokens=TOKENS, max_num_seqs=SEQS))


@needs_native
@pytest.mark.parametrize(("variant", "dtype"), [*((name, "float32") for name in VARIANTS), ("mixtral", "auto")])
def test_buffers_of_the_cpu_kernels(variant: str, dtype: str, tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path, variant, **WIDE, **VARIANTS[variant])
    loop = PagedLoop(load(folder, backend="native", dtype=dtype, num_threads=1))
    step, reserved = step_of(loop), shared_library().pdmesh_reserved_bytes
    before = reserved()
    logits = step()
    found = reserved() - before + logits.nbytes
    assert counted(loop) == pytest.approx(found, rel=0.01)
    before = reserved()
    step()
    assert reserved() == before, "a second step like the first needs no more"


@needs_native
def test_what_adapters_read_and_add_is_counted_too(tmp_path: Path) -> None:
    """For the largest rank: 256. All rows have one adapter, of a rank that is near it."""
    folder = make_tiny_family(tmp_path, "llama", **WIDE, **VARIANTS["llama"])
    loop = PagedLoop(load(folder, backend="native", dtype="float32", num_threads=1, max_loras=1))
    plain, slots, config = step_of(loop), loop.loaded.adapter_slots, loop.loaded.config
    assert slots is not None
    plain()
    without = StepBuffers(config, loop.loaded.model.weights, TOKENS, SEQS, 1).num_bytes()  # type: ignore[union-attr]
    shapes = sites_of(config).items()
    maps = {site: AdapterMap(torch.zeros(250, inputs), torch.zeros(outputs, 250)) for site, (outputs, inputs) in shapes}
    slots.put(0, Adapter(AdapterId("a", "0"), maps))
    before = shared_library().pdmesh_reserved_bytes()
    step_of(MixedLoop(loop.loaded, slots=[0] * SEQS))()
    found = shared_library().pdmesh_reserved_bytes() - before
    assert found <= counted(loop) - without <= 1.5 * found


def most_held(run: Callable[[], object], folder: Path) -> int:
    """The most bytes that torch's allocator had given out in a run at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return int(max(accumulate(num_bytes for _, num_bytes in changes)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_torch_holds(variant: str, tmp_path: Path) -> None:
    folder = make_tiny_family(tmp_path, variant, **WIDE, **VARIANTS[variant])
    loop = PagedLoop(load(folder, backend="torch", dtype="float32"))
    step = step_of(loop)
    found = most_held(step, tmp_path)
    assert found <= counted(loop) <= 2 * found
