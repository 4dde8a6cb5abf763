"""How fast 256 MB of KV move between two processes, over each transport, with and without their checksum."""

from __future__ import annotations

import ctypes
import json
import mmap
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.handoff.ends import NUM_BYTES
from benchmarks.harness import Figure, Process, free_ports, interleave, running, say
from benchmarks.spread import Spread
from kvtransfer.native.library import PROJECT, Native, address_of
from kvtransfer.sender.sender import NUM_CONNECTIONS
from kvtransfer.transports.registry import installed
from pdmesh.engine.kernels.cpu.build import load_library

COPY, STREAMED = "memcpy of 256 MB, one core", "copy of 256 MB past the caches, one core"
IPERF = f"iperf3 over loopback, {NUM_CONNECTIONS} connections"
SHARE_OF_LIMIT = 0.8
MAX_CHECKSUM_COST = 5.0  # %
GRPC_GOAL_GB_S = 0.7
WARM_UPS = 2
PAIRS_IN_A_ROUND = 3


class Pair:
    """Receiver and sender."""

    def __init__(self, receiver: Process, sender: Process) -> None:
        self._receiver, self._sender = receiver, sender
        self._sums = True
        self.can_leave_sums = self.set_sums(False) and self.set_sums(True)

    def set_sums(self, sums: bool) -> bool:
        """With or without checksums from here on; False where that cannot be chosen."""
        self._sums = sums
        return all(end.ask(checksums=sums)["done"] for end in (self._receiver, self._sender))

    def push(self, transport: str, *, sums: bool = True) -> float:
        """10^9 bytes a second of one push of everything, from connecting to the receipt of the commit."""
        if sums != self._sums:
            self.set_sums(sums)
        reservation = self._receiver.ask(reserve=transport)["reservation"]
        answer = self._sender.ask(push=reservation)
        return float(answer["num_bytes"] / answer["seconds"] / 1e9)


@contextmanager
def pair() -> Iterator[Pair]:
    """The sender ends first."""
    ends = "benchmarks.handoff.ends"
    with running(ends, "receive", ends_by_itself=True) as receiver, running(ends, "send", ends_by_itself=True) as sender:
        yield Pair(receiver, sender)


def throughput_figures(rounds: int) -> list[Figure]:
    """Medians of `rounds`, in turn with the limits that they are compared with."""
    with pair() as ends:
        cases: dict[str, Callable[[], float]] = {COPY: partial(copy_bandwidth_gb_s, NUM_BYTES)}
        if ends.can_leave_sums:
            cases[STREAMED] = partial(streamed_bandwidth_gb_s, NUM_BYTES)
        if has_iperf3():
            cases[IPERF] = partial(iperf3_gb_s, NUM_CONNECTIONS)
        else:
            say("left out: iperf3 is not installed (Debian, Ubuntu: apt install iperf3)")
        if "nixl" not in installed():
            say("left out: nixl is not installed (pip install --no-deps nixl nixl-cu12)")
        for transport in installed():
            cases[transport] = partial(ends.push, transport)
        for case in cases.values():
            for _ in range(WARM_UPS):
                case()
        medians = interleave(cases, rounds)
        costs = {transport: checksum_cost(ends, transport, rounds) for transport in installed() if ends.can_leave_sums}
    return [*_limits(medians), *(figure for each in installed() for figure in _figures_of(each, medians, costs.get(each)))]


def checksum_cost(ends: Pair, transport: str, rounds: int) -> Spread:
    """Percent of time that the checksum adds to a push, over pairs of pushes in turns of either order: with and without."""
    costs = []
    for number in range(PAIRS_IN_A_ROUND * rounds):
        gb_s = {sums: ends.push(transport, sums=sums) for sums in ((True, False) if number % 2 else (False, True))}
        costs.append(100 * (gb_s[False] / gb_s[True] - 1))
        say(f"{transport}, pair {number + 1}: the checksum adds {costs[-1]:.1f} %")
    return Spread.of(costs)


def _limits(medians: dict[str, float]) -> list[Figure]:
    return [Figure(name, medians[name], "GB/s", "higher") for name in (COPY, STREAMED, IPERF) if name in medians]


def _figures_of(transport: str, medians: dict[str, float], cost: Spread | None) -> list[Figure]:
    peer = {"shm": COPY, "tcp": IPERF}.get(transport)
    limit = medians.get(peer) if peer else None
    goal = GRPC_GOAL_GB_S if transport == "grpc" else limit and SHARE_OF_LIMIT * limit
    figures = [Figure(f"{transport}, 256 MB", medians[transport], "GB/s", "higher", goal=goal, limit=limit, peer=peer)]
    if limit:
        share = 100 * medians[transport] / limit
        figures.append(Figure(f"{transport}, share of {peer}", share, "%", "higher", goal=100 * SHARE_OF_LIMIT))
    if cost is not None:
        name = f"{transport}, time that the checksum adds"
        figures.append(Figure(name, cost.median, "%", "lower", goal=MAX_CHECKSUM_COST, peer=cost.in_words))
    return figures


# The limit of a hand-off through sockets: iperf3 over loopback.


SECONDS = 2
_START_S = 5.0


def has_iperf3() -> bool:
    """iperf3 is on PATH."""
    return shutil.which("iperf3") is not None


def iperf3_gb_s(num_connections: int) -> float:
    """10^9 bytes a second that arrive over so many connections. Raises RuntimeError with what iperf3 said."""
    [port] = free_ports(1)
    with subprocess.Popen(["iperf3", "--server", "--one-off", "--port", str(port)], stdout=subprocess.DEVNULL) as server:
        try:
            return _iperf3_client(port, num_connections)
        finally:
            server.kill()


def _iperf3_client(port: int, num_connections: int) -> float:
    command = ["iperf3", "--client", "127.0.0.1", "--port", str(port), "--time", str(SECONDS), "--json"]
    command += ["--parallel", str(num_connections)]
    deadline = time.monotonic() + _START_S
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr}
        if "error" not in answer:
            return float(answer["end"]["sum_received"]["bits_per_second"]) / 8e9
        if "refused" not in answer["error"] or time.monotonic() > deadline:  # it may not listen yet
            raise RuntimeError(f"iperf3 failed: {answer['error']}")
        time.sleep(0.05)


# The limits of a hand-off through memory: copies between buffers larger than the caches, by memcpy and past the caches.


def copy_bandwidth_gb_s(num_bytes: int) -> float:
    """10^9 bytes copied a second by one thread, once, between buffers whose pages are there."""
    target, source = _buffers(num_bytes)
    started = time.perf_counter()
    ctypes.memmove(address_of(memoryview(target)), address_of(memoryview(source)), num_bytes)
    return num_bytes / (time.perf_counter() - started) / 1e9


def streamed_bandwidth_gb_s(num_bytes: int) -> float:
    """The same with stores past the caches, which spare reading what is overwritten; without a checksum. Raises ValueError where
    the native library has no such copy."""
    target, source = _buffers(num_bytes)
    runs = np.array([[address_of(memoryview(target)), address_of(memoryview(source)), num_bytes]])
    started = time.perf_counter()
    _unsummed_library().copy(0, runs, streams=True)
    return num_bytes / (time.perf_counter() - started) / 1e9


@cache
def _unsummed_library() -> Native:
    return Native(load_library(lambda _text: None, project=PROJECT), "unsummed")


@cache
def _buffers(num_bytes: int) -> tuple[mmap.mmap, mmap.mmap]:
    buffers = mmap.mmap(-1, num_bytes), mmap.mmap(-1, num_bytes)
    for buffer in buffers:
        buffer[:] = b"\1" * num_bytes
    return buffers
