"""How long work on a device takes: queued many times as a graph, timed by the device's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

ROUNDS = 5
MOST_REPEATS = 200

Work = Callable[[], object]


class Deadline:
    """Of a part: it asks before it begins something that it could leave out."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    def allows(self, seconds: float) -> bool:
        return seconds <= self.left_s


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def wall_s(work: Work, device: str) -> float:
    """From the host's first call until the device is done."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def repeats_for(once_s: float, target_s: float) -> int:
    """How often work is repeated in a round so that all rounds last about `target_s`."""
    return max(1, min(MOST_REPEATS, int(target_s / ROUNDS / max(once_s, 1e-9))))


def device_s(work: Work, device: str) -> float:
    """Median seconds of one run on the device, gaps that the host makes left out: work is recorded as a graph where it can be."""
    return turns_s({"": work}, device)[""]


def turns_s(works: Mapping[str, Work], device: str) -> dict[str, float]:
    """The same of several, round after round in turn, so that a drift of the machine's clock touches all alike."""
    return replayed_s({name: _replay(work, device) for name, work in works.items()}, device)


def _replay(work: Work, device: str) -> Work:
    work()
    replay = captured(work) if device == "cuda" else work
    replay()
    return replay


def replayed_s(replays: Mapping[str, Work], device: str, target_s: float = 0.5) -> dict[str, float]:
    """For work that waits for nothing, such as replays of graphs, and that has run before."""
    repeats = {name: repeats_for(wall_s(replay, device), target_s) for name, replay in replays.items()}
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            samples[name].append(_span_s(replay, repeats[name], device) / repeats[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def captured(work: Work) -> Work:
    """A replay of it; work that cannot be recorded is returned as it is."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work
    return graph.replay


def _span_s(replay: Work, repeats: int, device: str) -> float:
    if device != "cuda":
        return wall_s(lambda: [replay() for _ in range(repeats)], device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(repeats):
        replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
