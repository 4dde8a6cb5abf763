"""Exchanges between the ranks of one engine, over torch.distributed (gloo on the CPU, NCCL on CUDA), and the linear maps with
them.

A group is an object of its own, not one of torch's process-wide ones, so a process may have several engines. Its sockets are on
loopback; nothing here is encrypted or authenticated, so the machine's users have to trust each other. Every exchange is bounded:
gloo's by its timeout; NCCL's, which the host only launches, by `Group.wait` on rank 0, with whose process all others end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pdmesh.engine.models.layers import Linear
from pdmesh.engine.parallel.split import Shard
from pdmesh.engine.parallel.tp_protocol import ExchangeFailed

HOST = "127.0.0.1"
MEETING_TIMEOUT = timedelta(seconds=60)  # for ranks that are all known to be ready
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
_POLL_S = 20e-6


class Store(Protocol):
    """torch's TCPStore, in which ranks publish their addresses."""

    port: int


class _Work(Protocol):
    def wait(self) -> object: ...


class _Exchanges(Protocol):
    """The part of torch's process groups that is used, which its stubs lack."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Work: ...
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: dist.GatherOptions) -> _Work: ...


def open_meeting_point(size: int) -> Store:
    """Open rank 0's store at a free port of loopback. Torch itself would listen on every address."""
    listener = socket.socket()
    listener.bind((HOST, 0))
    listener.listen(size)
    port = listener.getsockname()[1]
    return _store(port, size, listener.detach())


def find_meeting_point(port: int, size: int) -> Store:
    """Connect to rank 0's store from another rank. Raises ExchangeFailed."""
    with _as_exchange_failed():
        return _store(port, size, None)


class Group:
    """One rank's end of the group. All ranks make the same calls in the same order, with tensors of the same shapes."""

    def __init__(self, store: Store, shard: Shard, device: str, timeout_s: float) -> None:
        """Return when all ranks are there. Raises ExchangeFailed."""
        self.shard = shard
        timeout = timedelta(seconds=timeout_s)
        self._is_on_device, self.timeout_s = device == "cuda", timeout_s
        with _as_exchange_failed():
            self._group: _Exchanges = _nccl(store, shard, timeout) if device == "cuda" else _gloo(store, shard, timeout)
        if self._is_on_device:  # NCCL opens its connections with the first exchange: here, so that errors are reported
            self.sum(torch.zeros((1, 1), device=device))
            self.wait()

    def sum(self, x: Tensor) -> Tensor:
        """Sum x [M, N], which may be overwritten, over all ranks, with the same bits on each of them.

        The bits do not depend on M either, so a token's numbers do not depend on the batch: two numbers have one sum in either
        order; for more, gloo's own reduction would add in an order that depends on their position in `x`. NCCL's may.
        """
        if not x.numel():
            return x
        with _as_exchange_failed():
            if self.shard.size == 2 or x.device.type == "cuda":
                self._group.allreduce([x]).wait()
                return x
            parts = x.new_empty((self.shard.size, *x.shape))
            self._group.allgather([list(parts.unbind())], [x.contiguous()]).wait()
        return _added_in_order(parts)

    def gather(self, x: Tensor) -> Tensor:
        """Gather x [M, N] -> on rank 0 [M, size * N], ranks side by side; on the others `x`."""
        if not x.numel():
            return x.new_empty((x.shape[0], x.shape[1] * self.shard.size))
        options = dist.GatherOptions()
        options.rootRank = 0
        is_root = self.shard.rank == 0
        parts = x.new_empty((self.shard.size, *x.shape)) if is_root else x
        with _as_exchange_failed():
            self._group.gather([list(parts.unbind())] if is_root else [], [x.contiguous()], options).wait()
        return torch.cat(parts.unbind(), dim=1) if is_root else x

    def wait(self) -> None:
        """Wait until this rank's device has done all that was launched; on the CPU it has. Raises ExchangeFailed when that takes
        longer than the group's timeout, and ends the exchanges then."""
        if not self._is_on_device:
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        with _as_exchange_failed():
            finished = wait_until(done.query, self.timeout_s)
        if not finished:
            self.abort()
            raise ExchangeFailed(f"the device has waited for {self.timeout_s:g} s")

    def abort(self) -> None:
        """End exchanges that wait, from any thread: NCCL's kernels would wait for a dead rank for ever; gloo notices that its
        connection is closed. NCCL stops its kernels at once, then waits for the graphs that hold it, so it has a thread of its
        own."""
        if (abort := getattr(self._group, "abort", None)) is None:
            return
        if self._is_on_device:
            threading.Thread(target=abort, name="abort exchanges", daemon=True).start()
        else:
            abort()


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll every few microseconds, which is little beside a step of milliseconds; return whether it was done in time."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() >= deadline:
            return is_done()
        time.sleep(_POLL_S)
    return True


def _added_in_order(parts: Tensor) -> Tensor:
    """Sum [size, M, N] -> [M, N]: rank 0 + rank 1 + ..., in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _store(port: int, size: int, listener: int | None) -> Store:
    is_master = listener is not None
    make = dist.TCPStore  # type: ignore[attr-defined]  # torch.distributed has it, its stubs lack it
    return cast("Store", make(HOST, port, size, is_master, MEETING_TIMEOUT, wait_for_workers=False, master_listen_fd=listener))


def _gloo(store: Store, shard: Shard, timeout: timedelta) -> _Exchanges:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timeout
    options._threads = 1  # exchanges follow one another
    return cast("_Exchanges", dist.ProcessGroupGloo(store, shard.rank, shard.size, options))  # type: ignore[arg-type]


def _nccl(store: Store, shard: Shard, timeout: timedelta) -> _Exchanges:
    if not dist.is_nccl_available():
        raise ExchangeFailed("this torch has no NCCL; on CUDA ranks need it")
    leave_errors_to_us()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast("_Exchanges", dist.ProcessGroupNCCL(store, shard.rank, shard.size, options))  # type: ignore[arg-type]


def leave_errors_to_us() -> None:
    """Configure NCCL before its group is made, which reads this once. Torch's watchdog thread would end the process by SIGABRT
    where an exchange fails or takes too long (its default, 3), or break off the exchange (2), so that a step would end with
    invalid numbers. Rank 0 waits with a bound of its own (`Group.wait`) and is notified of ranks that end (`tp_group.py`). And an
    exchange must not block the host (`wait` of torch's work): in a graph's capture that is not allowed."""
    os.environ.update(NCCL_SETTINGS)


@contextmanager
def _as_exchange_failed() -> Iterator[None]:
    """Turn the RuntimeError of torch (its DistError among them) for a peer that is gone or silent into ExchangeFailed."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeFailed(str(error).partition("\n")[0]) from error


# The linear maps behind which ranks exchange. Both are `pdmesh.engine.models.layers.Linear`s: a model does not know that it is
# distributed.
#
# `inner`: the map over the rank's own weights.


class SummedLinear:
    """Sum the outputs over ranks: each rank has some of the inputs."""

    def __init__(self, linear: Linear, group: Group) -> None:
        self.kind, self.inner, self._group = linear.kind, linear, group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum(self.inner(x))


class GatheredHead:
    """Gather logits: each rank has some of the vocabulary; rank 0 gets all [M, vocab_size], the others' result is of no use."""

    def __init__(self, linear: Linear, vocab_size: int, group: Group) -> None:
        self.kind, self.inner, self._vocab_size, self._group = linear.kind, linear, vocab_size, group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.gather(self.inner(x))[:, : self._vocab_size].contiguous()
