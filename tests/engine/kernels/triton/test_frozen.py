"""The stand-in for CUDA graphs: a replay repeats what was recorded, and nothing else."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.cuda_graphs import make_recorder
from tests.engine.kernels.triton.frozen import Frozen, MemoryGone
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.kernels.triton.refused import CaptureRefused

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there are real graphs")


@triton.jit
def _add_kernel(x: tl.tensor, out: tl.tensor, amount: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + amount)


def added(x: Tensor, amount: int, programs: int = 2) -> Tensor:
    out = torch.empty_like(x)
    _add_kernel[(programs,)](x, out, amount, BLOCK=4)
    return out


def test_it_is_what_the_backend_records_with() -> None:
    assert isinstance(make_recorder(torch.device("cpu")), Frozen)


def test_numbers_and_grids_are_those_of_the_recording_and_tensors_are_read_again() -> None:
    x, given = torch.zeros(8), {"amount": 1, "programs": 2, "factor": 3.0}

    def work() -> tuple[Tensor, ...]:
        return (added(x, int(given["amount"]), int(given["programs"])) * given["factor"],)

    recording = Frozen().record(work)
    assert recording.output[0].tolist() == [3.0] * 8
    x.fill_(10)
    given.update(amount=5, programs=1, factor=7.0)
    recording.replay()
    assert recording.output[0].tolist() == [33.0] * 8


def test_nothing_of_python_runs_again() -> None:
    runs = list[int]()

    def work() -> tuple[Tensor, ...]:
        runs.append(1)
        return ()

    Frozen().record(work).replay()
    assert len(runs) == 2  # the warm-up and the recording


def test_operations_write_where_they_wrote() -> None:
    """In place, with `out`, through views, and of their own results."""
    x, total, kept = torch.ones(2, 4), torch.zeros(4), torch.zeros(4)

    def work() -> tuple[Tensor, ...]:
        total.add_(x[1])
        torch.mul(x[0], 2, out=kept)
        first, second = x.chunk(2, dim=1)
        return first + second, kept.view(2, 2)

    recording = Frozen().record(work)
    total.zero_()
    x.fill_(4)
    recording.replay()
    assert (total.tolist(), kept.tolist()) == ([4.0] * 4, [8.0] * 4)
    assert (recording.output[0].tolist(), recording.output[1].tolist()) == ([[8.0] * 2] * 2, [[8.0] * 2] * 2)


def test_own_memory_holds_nothing_from_replay_to_replay() -> None:
    """Whose first run makes a buffer keeps it; what is allocated in a recording is nobody's before each replay."""
    made = list[Tensor]()
    x = torch.zeros(4)

    def work() -> tuple[Tensor, ...]:
        if not made:
            made.append(torch.full_like(x, 2.0))
        stale, counted = torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)
        return made[0] + x, stale + 0.0, counted + 0

    kept, stale, counted = Frozen().record(work).output
    assert kept.tolist() == [2.0] * 4
    assert bool(stale.isnan().all())
    assert counted.tolist() == [-1] * 4


def test_a_replay_may_overwrite_what_was_recorded_later() -> None:
    recorder, x = Frozen(), torch.ones(4)
    earlier, later = recorder.record(lambda: (x + 1,)), recorder.record(lambda: (x + 2,))
    assert earlier.output[0].tolist() == [2.0] * 4  # held while the later one was recorded
    earlier.replay()
    assert bool(later.output[0].isnan().all())
    later.replay()
    assert (earlier.output[0].tolist(), later.output[0].tolist()) == ([2.0] * 4, [3.0] * 4)


def test_memory_that_is_freed_behind_the_recording() -> None:
    held = [torch.ones(8)]
    recording = Frozen().record(lambda: (added(held[0], 1),))
    recording.replay()
    held.clear()
    gc.collect()  # the interpreter's copies of arguments to the host are a cycle of references
    with pytest.raises(MemoryGone, match=re.escape("torch.float32 (8,)")):
        recording.replay()


X = torch.ones(4)
REFUSED: dict[str, Callable[[], object]] = {
    "item": lambda: X[0].item(),
    "item, asked by a condition": lambda: bool(X[0]),
    "equal": lambda: torch.equal(X, X),
    "cpu": lambda: X.cpu(),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "nonzero": lambda: X.nonzero(),
    "index by a mask": lambda: X[X > 0],
    "numbers of Python": lambda: X[[0, 1]],
    "tensor": lambda: torch.tensor([1.0], device=X.device),
    "zeros": lambda: torch.zeros(4),
    "pin_memory": lambda: X.pin_memory(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_capture_refuses(name: str) -> None:
    runs = list[int]()

    def work() -> tuple[Tensor, ...]:
        runs.append(1)
        if len(runs) == 2:  # a warm-up may do anything
            REFUSED[name]()
        return ()

    with pytest.raises(CaptureRefused, match=f"^{name.partition(',')[0]}"):
        Frozen().record(work)
    assert X.tolist() == [1.0] * 4  # it is no longer refused
