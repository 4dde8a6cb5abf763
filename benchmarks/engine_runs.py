"""Run prompts through one engine in this process: the unseparated side of every comparison."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block

# Fields of EngineConfig: the numbers that an engine, or every worker of a mesh, computes in.
Settings = Mapping[str, object]
DEFAULT: Settings = {}  # int8 weights, where the CPU kernels serve
FLOAT32: Settings = {"dtype": "float32"}  # what transformers is compared in


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn: greedy at temperature 0, else with a seed."""

    temperature: float = 0.0
    seed: int = 0

    def params(self, num_tokens: int, *, ignore_eos: bool = False) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=num_tokens, ignore_eos=ignore_eos)


GREEDY = Draw()
SAMPLED = Draw(temperature=0.8, seed=20_26)


def flags_of(settings: Settings) -> tuple[str, ...]:
    """The same settings as a worker's flags."""
    return tuple(part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value)))


def make_engine(folder: Path, **settings: object) -> Engine:
    """An engine on this folder; `settings` are fields of EngineConfig."""
    fields: dict[str, object] = {"model": str(folder), "kv_memory_mb": 1024, **settings}
    if "num_blocks" in settings:
        fields["kv_memory_mb"] = 0
    return Engine(EngineConfig(**fields), hash_block=hash_block)  # type: ignore[arg-type]


def prompt(number: int, length: int) -> list[int]:
    """Token ids that share no block with another number's."""
    return [1000 + (number * 7919 + position * 104_729) % 40_000 for position in range(length)]


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str = "r") -> list[list[int]]:
    """All prompts at once, batched as the scheduler sees fit; returns the output of each (choice 0)."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        request = EngineRequest(request_id=f"{name}{number}", prompt=tuple(prompt), sampling=params, cache_root=b"equality")
        if not engine.add(request):
            raise RuntimeError(f"the engine takes no more than {number} requests: raise max_num_seqs")
    while engine.has_work:
        result = engine.step()
        for update in result.updates if result else ():
            outputs[int(update.request_id.removeprefix(name))].extend(update.token_ids)
    engine.check_integrity()
    return outputs


def run_alone(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """One prompt after the other."""
    return [run(engine, [prompt], params, name=f"a{number}-")[0] for number, prompt in enumerate(prompts)]


def timed(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str) -> tuple[float, int]:
    """Seconds from the first step that only decodes to the end, and the tokens drawn in that time."""
    started, drawn = 0.0, 0
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(request_id=f"{name}{number}", prompt=tuple(prompt), sampling=params))
    while engine.has_work:
        waiting = engine.stats().num_waiting_tokens
        result = engine.step()
        if started and result:
            drawn += sum(len(update.token_ids) for update in result.updates)
        elif waiting == 0 or (result and result.num_tokens == len(prompts)):
            started = time.perf_counter()
    return time.perf_counter() - started, drawn
