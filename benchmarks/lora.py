"""`make bench-lora`: what LoRA adapters cost a decode step, beside the same step of the base model.

A step of eight sequences, two for each of four adapters of rank 16 on all maps, over the step of the same sequences without
adapters, both in one process, in turn. What decides is bytes: a decode step reads every weight once, and A and B of each of its
adapters,

    limit = 1 + bytes of the adapters / bytes of the weights

which for SmolLM2-135M is 4 x 4.9 million numbers beside 135 million. The native kernels hold A and B in float32 where the model
is float32 (1.15), else in bfloat16: beside int8 that is 1.29, where float32 would be 1.58. They wait at no further barrier. A
step also computes attention, which reads no weights, so that the measured ratio may be below the limit.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import MODEL, Figure, interleave, parser_of, say, write
from pdmesh.adapter_id import AdapterId
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu.model import kv_head_size
from pdmesh.engine.kv_cache.pool import KVPool, KVShape
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.lora.adapter import Adapter, AdapterMap, sites_of
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.models.registry import ensure_model

BACKENDS: dict[str, dict[str, str]] = {
    "native, int8": {"backend": "native"},
    "native, float32": {"backend": "native", "dtype": "float32"},
    "torch, float32": {"backend": "torch", "dtype": "float32"},
}
BATCH, CONTEXT, BLOCK = 8, 128, 16
SLOTS = (0, 0, 1, 1, 2, 2, 3, 3)
RANK = 16
GOAL = 1.25


def random_adapter(config: ModelConfig, number: int) -> Adapter:
    """Return one of all maps."""
    generator = torch.Generator().manual_seed(number)
    draw = partial(torch.randn, generator=generator)
    shapes = sites_of(config).items()
    maps = {site: AdapterMap(draw(RANK, inputs) / 100, draw(outputs, RANK) / 100) for site, (outputs, inputs) in shapes}
    return Adapter(AdapterId(f"a{number}", str(number)), maps)


@dataclass(frozen=True)
class Steps:
    """Decode steps of sequences whose contexts are computed."""

    loaded: LoadedModel
    pool: Tensor

    @staticmethod
    def of(loaded: LoadedModel) -> Steps:
        """Compute the contexts, with adapters loaded in all slots."""
        config, dtype = loaded.config, loaded.kv_dtype
        blocks = BATCH * (CONTEXT // BLOCK + 1)
        head = kv_head_size(config.pool_dim, dtype)
        pool = KVPool(KVShape(config.num_layers, blocks, BLOCK, config.pool_heads, head, dtype), "cpu").tensor
        assert loaded.adapter_slots is not None
        for slot in set(SLOTS):
            loaded.adapter_slots.put(slot, random_adapter(config, slot))
        loaded.model.forward(batch_of(range(CONTEXT)), pool)
        return Steps(loaded, pool)

    def timed(self, batch: StepBatch, count: int) -> float:
        """Return the median seconds of a step."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.loaded.model.forward(batch, self.pool)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def batch_of(positions: Sequence[int]) -> StepBatch:
    """Return a step of these positions of every sequence."""
    per_sequence = CONTEXT // BLOCK + 1
    tables = [list(range(first, first + per_sequence)) for first in range(0, BATCH * per_sequence, per_sequence)]
    slots = [table[0] * BLOCK + position for table in tables for position in positions]
    ends = [number * len(positions) for number in range(BATCH + 1)]
    return StepBatch(
        token_ids=torch.arange(len(slots)) % 256,
        positions=torch.tensor(list(chain.from_iterable(positions for _ in tables))),
        slot_mapping=torch.tensor(slots),
        query_starts=ends,
        context_lens=[positions[-1] + 1] * BATCH,
        block_tables=tables,
        logits_rows=torch.tensor(ends[1:]) - 1,
    )


def limit_of(loaded: LoadedModel, weight_bytes: int) -> float:
    """Return 1 + the bytes of the adapters over those of the weights."""
    width = 2 if loaded.dtype == torch.bfloat16 else 4
    adapters = sum(random_adapter(loaded.config, slot).num_bytes for slot in set(SLOTS)) * width // 4
    return 1 + adapters / weight_bytes


def measured(name: str, loaded: LoadedModel, rounds: int, count: int) -> Figure:
    """Return the ratio of the two steps."""
    steps, base = Steps.of(loaded), batch_of([CONTEXT])
    cases: dict[str, Callable[[], float]] = {
        "base": partial(steps.timed, base, count),
        "adapters": partial(steps.timed, replace(base, adapter_slots=SLOTS), count),
    }
    seconds = interleave({f"{name}: {case}": run for case, run in cases.items()}, rounds)
    plain, adapted = seconds.values()
    say(f"{name}: {1e3 * plain:.2f} ms without adapters, {1e3 * adapted:.2f} ms with four")
    weights = getattr(loaded.model, "weights", None)  # torch's are as many bytes as the kernels' in float32
    config = loaded.config
    floats = 4 * (sum(a * b for a, b in sites_of(config).values()) + config.vocab_size * config.hidden_size)
    limit = limit_of(loaded, floats if weights is None else weights.bytes_per_step)
    title = f"{name}: step of {BATCH} sequences with four adapters over the base's"
    return Figure(title, round(adapted / plain, 3), "times", "lower", goal=GOAL, limit=round(limit, 3))


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.lora", __doc__)
    parser.add_argument("--model", default=MODEL, help="known name or folder (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="of both steps, in turn (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of a round, whose median counts (default: %(default)s)")
    args = parser.parse_args(argv)
    folder, found = str(ensure_model(args.model, say)), []
    for name, settings in BACKENDS.items():
        fields: dict[str, Any] = {"max_context": 2 * CONTEXT, "block_size": BLOCK, "max_loras": len(set(SLOTS)), **settings}
        found.append(measured(name, load_model(EngineConfig(model=folder, **fields)), args.rounds, args.steps))
    write("lora", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
