"""The unseparated engine without speculation: what every answer of the mesh has to be."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path

from benchmarks.engine_runs import make_engine
from pdmesh.engine.engine import Engine
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams

_ids = count()  # of requests: one that a failed test has left behind is in no other's way


DEFAULT, FLOAT32 = ("auto", "auto"), ("float32", "none")
"""(dtype, quantization) of the weights: as workers choose by themselves, and as they were trained."""


@lru_cache(maxsize=2)
def _engine(folder: Path, dtype: str, quantization: str, kv_dtype: str) -> Engine:
    """One thread: several would wait for each other in spins while a mesh has the cores."""
    fields = {"dtype": dtype, "quantization": quantization, "kv_dtype": kv_dtype, "speculation": "none", "num_threads": 1}
    return make_engine(folder, kv_memory_mb=512, **fields)  # in float32 it takes twice as much


def answer(folder: Path, prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
    """Token ids of each choice, from one engine alone."""
    return answers(folder, [(prompt, params)])[0]


def answers(
    folder: Path, jobs: Sequence[tuple[Sequence[int], SamplingParams]], weights: tuple[str, str] = DEFAULT, kv_dtype: str = "auto"
) -> list[list[list[int]]]:
    """The same for several requests, batched (that a batch changes nothing is shown in tests/engine)."""
    engine = _engine(folder, *weights, kv_dtype)
    outputs: list[list[list[int]]] = [[[] for _ in range(params.n)] for _, params in jobs]
    numbers = {str(next(_ids)): number for number in range(len(jobs))}
    for request_id, number in numbers.items():
        prompt, params = jobs[number]
        assert engine.add(EngineRequest(request_id=request_id, prompt=tuple(prompt), sampling=params, cache_root=b"oracle"))
    while engine.has_work:
        result = engine.step()
        for update in result.updates if result else ():
            if update.request_id in numbers:
                outputs[numbers[update.request_id]][update.choice].extend(update.token_ids)
    return outputs


def prompt_of(number: int, length: int) -> list[int]:
    """A prompt of bytes that differs from others in its first block already."""
    return [(number * 37 + position * 11 + position // 7) % 250 + 1 for position in range(length)]
