"""Which kernels a sampler has compiled for Hopper, on a machine without a GPU: `python -m tests.engine.kernels.triton.variants`.

Launches go to Triton as on a GPU, with the same arguments, and stop where the kernel is compiled: so that what Triton makes of an
argument's value, its alignment or a number that is 1, shows here. One line of JSON: what was compiled when it was prepared, and
what steps of all kinds had compiled after that, which a request would have waited for. A process of its own, as hopper.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.sampling.sampler import SampleRow
from pdmesh.sampling_params import SamplingParams

HOPPER = GPUTarget("cuda", 90, 32)
VOCAB = 1001  # rows and tables of it are no multiples of 16 bytes long


class _Owner:
    pass


class _Driver:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> Any:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def count_compiled() -> dict[str, str]:
    """From now on launches only compile: {hash: kernel} of what they did."""
    driver.set_active(_Driver())
    compiled, launch = dict[str, str](), JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[kernel.hash] = self.__name__
        given = dict(zip(self.arg_names, args, strict=False))
        if "tokens" in given:
            given["tokens"].zero_()  # nothing was drawn, and log-probabilities are looked up
        return kernel

    JITFunction.run = run
    return compiled


def steps() -> Iterator[list[SampleRow]]:
    """Of 1 to 64 rows, of all kinds."""
    for num_rows in (*range(1, 20), 31, 32, 33, 63, 64):
        yield [_row(temperature=0.0)] * num_rows
        yield [_row(temperature=0.7, top_p=0.9, seed=i) for i in range(num_rows)]
        many = tuple(range(num_rows * 4))
        yield [_row(temperature=0.7 * (i % 2), top_k=i, min_tokens=9, stop_token_ids=many) for i in range(num_rows)]
        yield [_row(repetition_penalty=1.1 + (i % 2), output=(5,) * (i % 3), owner=_Owner()) for i in range(num_rows)]
        yield [_row(frequency_penalty=0.5 * (i % 2), output=(5,) * 20, num_guessed=i % 5) for i in range(num_rows)]
        yield [_row(allowed=np.ones(-(-VOCAB // 32), np.uint32), logprobs=num_rows % 3, index=1)] * num_rows


def _row(
    output: tuple[int, ...] = (), index: int = 3, allowed: Any = None, num_guessed: int = 0, owner: Any = None, **params: Any
) -> SampleRow:
    params = {"seed": 1, "max_tokens": 20, **params}
    return SampleRow(SamplingParams(**params), 0, index, (1, 2), output, frozenset(), allowed, num_guessed, owner)


def main() -> None:
    compiled = count_compiled()
    DeviceSampler().prepare(VOCAB, torch.device("cpu"))
    prepared = dict(compiled)
    sampler = DeviceSampler()
    for rows in steps():
        sampler.sample(torch.zeros((len(rows), VOCAB)), rows)
        sampler.sample(torch.zeros((len(rows) + 1, VOCAB))[1:], rows)  # a view that is not aligned
    later = [name for key, name in compiled.items() if key not in prepared]
    print(json.dumps({"prepared": sorted(prepared.values()), "later": later}))


if __name__ == "__main__":
    main()
