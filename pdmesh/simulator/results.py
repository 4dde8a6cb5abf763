"""Sums up the outcome of requests as a stream, so that millions of them take no more memory than a few. Pure.

A request meets its objectives when it completed and kept all of them; one without objectives meets them by completing. It counts
in the window of its arrival.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmesh.simulator.request import End, Request

# Quantiles of durations in bounded memory: counts by size, each class RATIO times as wide as the one before.


RATIO = 1.02
"""A value is reported as the geometric middle of its class: off by at most RELATIVE_ERROR of itself."""
RELATIVE_ERROR = math.sqrt(RATIO) - 1
LEAST_S = 1e-6
MOST_S = 1e6
_LOG = math.log(RATIO)
NUM_CLASSES = math.ceil(math.log(MOST_S / LEAST_S) / _LOG) + 1


class Histogram:
    """Count seconds by class. Values below LEAST_S or above MOST_S count as that."""

    def __init__(self) -> None:
        self.num_values = 0
        self.total_s = 0.0
        self.max_s = 0.0
        self._counts = [0] * NUM_CLASSES

    def add(self, value_s: float) -> None:
        """Add a value."""
        self.num_values += 1
        self.total_s += value_s
        self.max_s = max(self.max_s, value_s)
        self._counts[round(math.log(min(max(value_s, LEAST_S), MOST_S) / LEAST_S) / _LOG)] += 1

    @property
    def mean_s(self) -> float:
        """Return the mean; 0 without values."""
        return self.total_s / self.num_values if self.num_values else 0.0

    def quantile(self, q: float) -> float:
        """Return the least value that at least the share `q` does not exceed, within RELATIVE_ERROR; 0 without values."""
        left = max(1, math.ceil(q * self.num_values))
        for number, count in enumerate(self._counts):
            left -= count
            if left <= 0:
                return min(self.max_s, LEAST_S * RATIO**number)
        return 0.0


MAX_WINDOWS = 4096
"""Beyond this number each pair of windows becomes one of twice the length."""


@dataclass
class Window:
    """Sum the requests that arrived in one window."""

    num_arrived: int = 0
    num_completed: int = 0
    num_met: int = 0
    num_refused: int = 0
    num_lost: int = 0

    def add(self, other: "Window") -> None:
        """Add another window's requests."""
        self.num_arrived += other.num_arrived
        self.num_completed += other.num_completed
        self.num_met += other.num_met
        self.num_refused += other.num_refused
        self.num_lost += other.num_lost

    @property
    def attainment(self) -> float:
        """Return the SLO attainment of those that ended; 1 without any."""
        num_ended = self.num_completed + self.num_refused + self.num_lost
        return self.num_met / num_ended if num_ended else 1.0


@dataclass
class Results:
    """Collect the results. `window_s`: the length of a window, which doubles when a run is longer than MAX_WINDOWS of them."""

    window_s: float = 60.0
    total: Window = field(default_factory=Window)
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    reasons: Counter[str] = field(default_factory=Counter)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_fetched_tokens: int = 0
    num_restored_tokens: int = 0
    num_local: int = 0
    num_resubmissions: int = 0
    ended_at: float = 0.0
    windows: list[Window] = field(default_factory=list)

    def arrived(self, request: Request) -> None:
        """Count an arrival."""
        self.total.num_arrived += 1
        self._window(request).num_arrived += 1

    def ended(self, request: Request, end: End, now: float) -> None:
        """Count the end of a request."""
        self.ended_at = max(self.ended_at, now)
        self.num_resubmissions += request.num_resubmissions
        is_met = end is End.COMPLETED and meets(request)
        for window in (self.total, self._window(request)):
            window.num_completed += end is End.COMPLETED
            window.num_refused += end is End.REFUSED
            window.num_lost += end is End.LOST
            window.num_met += is_met
        if end is End.COMPLETED:
            self._completed(request)
        else:
            self.reasons[request.reason] += 1

    @property
    def goodput(self) -> float:
        """Return the goodput: requests in a second that met their objectives, over the whole run."""
        return self.total.num_met / self.ended_at if self.ended_at else 0.0

    @property
    def sources(self) -> dict[str, int]:
        """Return where the KV of the prompts of completed requests came from, in tokens: computed, reused from the worker's pool,
        fetched from another worker for the request, restored from tiers for it. They add up to `num_input_tokens`."""
        num_moved = self.num_fetched_tokens + self.num_restored_tokens
        return {
            "computed": self.num_input_tokens - self.num_cached_tokens,
            "reused": self.num_cached_tokens - num_moved,
            "fetched": self.num_fetched_tokens,
            "restored": self.num_restored_tokens,
        }

    def _completed(self, request: Request) -> None:
        self.num_input_tokens += request.num_input
        self.num_output_tokens += request.num_output
        num_cached = min(request.num_cached, request.num_input)
        self.num_cached_tokens += num_cached
        self.num_fetched_tokens += min(request.num_fetched, num_cached)
        self.num_restored_tokens += min(request.num_restored, num_cached)
        self.num_local += request.is_local
        if request.ttft_s is not None:
            self.ttft.add(request.ttft_s)
        if request.tpot_s is not None:
            self.tpot.add(request.tpot_s)

    def _window(self, request: Request) -> Window:
        number = int(request.arrival.at_s / self.window_s)
        while number >= MAX_WINDOWS:
            self._halve()
            number = int(request.arrival.at_s / self.window_s)
        while len(self.windows) <= number:
            self.windows.append(Window())
        return self.windows[number]

    def _halve(self) -> None:
        self.window_s *= 2
        for early, late in zip(self.windows[::2], self.windows[1::2], strict=False):
            early.add(late)
        self.windows = self.windows[::2]


def meets(request: Request) -> bool:
    """Return whether a completed request kept its objectives."""
    ttft_s, tpot_s = request.ttft_s, request.tpot_s
    late = request.ttft_goal_s is not None and ttft_s is not None and ttft_s > request.ttft_goal_s
    slow = request.tpot_goal_s is not None and tpot_s is not None and tpot_s > request.tpot_goal_s
    return not (late or slow)


# The results as numbers for programs and as a page for people.


QUANTILES = (0.5, 0.9, 0.99)
MAX_LINES = 24
"""Lines for windows in the text."""


def numbers(results: Results, pod_seconds: Mapping[str, float], *, wall_s: float) -> dict[str, object]:
    """Return the numbers as one object; `wall_s`: real seconds that the simulation took."""
    total = results.total
    return {
        "num_requests": total.num_arrived,
        "num_completed": total.num_completed,
        "num_refused": total.num_refused,
        "num_lost": total.num_lost,
        "reasons": dict(sorted(results.reasons.items())),
        "num_local": results.num_local,
        "num_resubmissions": results.num_resubmissions,
        "num_input_tokens": results.num_input_tokens,
        "num_output_tokens": results.num_output_tokens,
        **{f"num_{source}_tokens": count for source, count in results.sources.items()},
        "simulated_s": results.ended_at,
        "attainment": total.attainment,
        "goodput_per_s": results.goodput,
        "ttft_s": _times(results.ttft),
        "tpot_s": _times(results.tpot),
        "quantile_error": RELATIVE_ERROR,
        "pod_seconds": dict(pod_seconds),
        "window_s": results.window_s,
        "windows": [
            {"num_arrived": w.num_arrived, "num_completed": w.num_completed, "num_met": w.num_met, "num_refused": w.num_refused}
            for w in results.windows
        ],
        "wall_s": wall_s,
        "requests_per_wall_s": total.num_arrived / wall_s if wall_s else 0.0,
    }


def text(results: Results, pod_seconds: Mapping[str, float], *, wall_s: float) -> str:
    """Return a short page."""
    total = results.total
    speed = total.num_arrived / wall_s if wall_s else 0.0
    refused = ", ".join(f"{reason} {count}" for reason, count in results.reasons.most_common())
    lines = [
        f"{total.num_arrived} requests in {results.ended_at:.0f} s (simulated in {wall_s:.1f} s, {speed:.0f} requests/s)",
        f"completed  {total.num_completed}, of which {_share(results.num_local, total.num_completed)} LOCAL",
        f"refused    {total.num_refused}   lost {total.num_lost}" + (f"   ({refused})" if refused else ""),
        f"objectives {total.attainment:.2%} met, goodput {results.goodput:.2f} requests/s",
        f"TTFT       {_line(results.ttft)}",
        f"TPOT       {_line(results.tpot)}",
        f"tokens     {results.num_input_tokens} in, {results.num_output_tokens} out",
        "prompts    " + ", ".join(f"{count} {source}" for source, count in results.sources.items() if count),
        "pods       " + ", ".join(f"{pool} {seconds:.0f} s" for pool, seconds in pod_seconds.items() if seconds),
    ]
    return "\n".join(lines + _windows(results))


def _windows(results: Results) -> list[str]:
    """Return lines for as many windows as fit on a page, merging several into one."""
    windows = results.windows
    each = -(-len(windows) // MAX_LINES) if windows else 1
    lines = ["", "from       arrived  completed  refused  met"]
    for start in range(0, len(windows), each):
        some = windows[start : start + each]
        arrived, completed = sum(w.num_arrived for w in some), sum(w.num_completed for w in some)
        refused = sum(w.num_refused for w in some)
        met = _share(sum(w.num_met for w in some), arrived)
        lines.append(f"{start * results.window_s:7.0f} s  {arrived:7d}  {completed:9d}  {refused:7d}  {met}")
    return lines


def _times(histogram: Histogram) -> dict[str, float]:
    quantiles = {f"p{round(100 * q)}": histogram.quantile(q) for q in QUANTILES}
    return {"mean": histogram.mean_s, **quantiles, "max": histogram.max_s}


def _line(histogram: Histogram) -> str:
    """Return quantiles in milliseconds."""
    return ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in _times(histogram).items()) + " ms"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
