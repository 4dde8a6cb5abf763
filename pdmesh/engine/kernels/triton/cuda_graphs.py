"""Recording a piece of work once and running it again: CUDA graphs, and the same without a GPU.

Work that can be recorded takes nothing, reads and writes tensors that stay where they are, and asks the device nothing. What it
returns are tensors; after each replay they hold the new results, until the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]


class Recording(NamedTuple):
    output: tuple[Tensor, ...]
    replay: Callable[[], None]


class Recorder(Protocol):
    def record(self, work: Work) -> Recording:
        """Runs the work, perhaps more than once, and keeps it; `output` holds its results. Further runs of it come in the same
        stream."""
        ...


class CudaGraphs:
    """One graph for each piece of work; all share one pool of memory, since no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, work: Work) -> Recording:
        """The first run compiles kernels and lets libraries make their plans, none of which a capture may hold."""
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Copies of a hand-off go on meanwhile on threads of their own, which ask for events: no matter of this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        graph.replay()  # a capture computes nothing
        return Recording(output, graph.replay)


class Repeats:
    """Calls the same function again, and puts what it returns where the first results are, as a graph does: so that buffers,
    padding and buckets are those of a GPU on a machine without one."""

    def record(self, work: Work) -> Recording:
        output = work()

        def replay() -> None:
            for kept, new in zip(output, work(), strict=True):
                kept.copy_(new)

        return Recording(output, replay)


def make_recorder(device: torch.device) -> Recorder:
    return CudaGraphs() if device.type == "cuda" else Repeats()


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Recordings hold the address of a pool."""
    return (one.data_ptr(), one.shape, one.dtype, one.stride()) == (other.data_ptr(), other.shape, other.dtype, other.stride())
