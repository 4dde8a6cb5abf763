"""What a part is given, and where its figures go as soon as they are known: who is stopped loses only what was not begun."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.shapes import Scale
from benchmarks.harness import Figure, say
from pdmesh.engine.hardware import MachineLimits, measure_limits

# How long work on a device takes: queued many times as a graph, timed by the device's own clock.


ROUNDS = 5
MOST_REPEATS = 200

Work = Callable[[], object]


# Which share of the time some kernel or copy runs, as the profiler sees it: gaps between a graph's kernels count as idle.
Span = tuple[float, float]


def covered_share(spans: Sequence[Span]) -> float:
    """Of the time from the first beginning to the last end, that in which at least one span lies; 0 for none."""
    if not spans:
        return 0.0
    ordered = sorted(spans)
    covered, end = 0.0, ordered[0][0]
    for first, last in ordered:
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered / (end - ordered[0][0]) if end > ordered[0][0] else 0.0


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


@dataclass
class Context:
    """`limits` None: nobody has measured them, so a part that needs them does."""

    device: str
    scale: Scale
    deadline: Deadline
    sink: Path
    limits: MachineLimits | None = None
    capability: int = 90  # whose kernels are compiled ahead, as CUDA counts: 90 is Hopper
    num_failures: int = field(default=0)

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.scale.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def machine(self) -> MachineLimits:
        if self.limits is None:
            self.limits = measure_limits("triton", self.scale.dtype, self.device, 0)
        return self.limits

    def add(self, figure: Figure) -> None:
        self._write({"figure": asdict(figure)})
        goal = f"  (goal {figure.goal})" if figure.goal is not None else ""
        say(f"  {figure.name}: {_short(figure.value)} {figure.unit}{goal}")

    def note(self, text: str) -> None:
        """What is no number: what was counted, what was not measured and why."""
        self._write({"note": text})
        say(f"  {text}")

    def fail(self, text: str) -> None:
        self.num_failures += 1
        self._write({"failure": text})
        say(f"  NOT EQUAL: {text}")

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether so much is left; says what is left out if not."""
        if self.deadline.allows(seconds):
            return True
        self.note(f"left out, as the part's time was used up: {what}")
        return False

    def _write(self, line: dict[str, object]) -> None:
        with self.sink.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
