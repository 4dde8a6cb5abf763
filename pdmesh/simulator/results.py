"""What came of the requests: streamed into sums, so that millions of them take no more memory than a few. Pure.

A request meets its objectives when it was completed and kept all that it was promised; one without any meets them by being
completed. It counts in the window of its arrival.
"""

from collections import Counter
from dataclasses import dataclass, field

from pdmesh.simulator.histogram import Histogram
from pdmesh.simulator.request import End, Request

MAX_WINDOWS = 4096
"""With more of them, each two become one of twice the length."""


@dataclass
class Window:
    """Requests that arrived in it."""

    num_arrived: int = 0
    num_completed: int = 0
    num_met: int = 0
    num_refused: int = 0
    num_lost: int = 0

    def add(self, other: "Window") -> None:
        """Those of another, too."""
        self.num_arrived += other.num_arrived
        self.num_completed += other.num_completed
        self.num_met += other.num_met
        self.num_refused += other.num_refused
        self.num_lost += other.num_lost

    @property
    def attainment(self) -> float:
        """The share that met its objectives, of those that ended; 1 without any."""
        num_ended = self.num_completed + self.num_refused + self.num_lost
        return self.num_met / num_ended if num_ended else 1.0


@dataclass
class Results:
    """`window_s`: the length of a window, which doubles when a run is longer than MAX_WINDOWS of them."""

    window_s: float = 60.0
    total: Window = field(default_factory=Window)
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    reasons: Counter[str] = field(default_factory=Counter)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_local: int = 0
    num_resubmissions: int = 0
    ended_at: float = 0.0
    windows: list[Window] = field(default_factory=list)

    def arrived(self, request: Request) -> None:
        """It is at a router."""
        self.total.num_arrived += 1
        self._window(request).num_arrived += 1

    def ended(self, request: Request, end: End, now: float) -> None:
        """It is over."""
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
        """Requests in a second that met their objectives, over the whole run."""
        return self.total.num_met / self.ended_at if self.ended_at else 0.0

    def _completed(self, request: Request) -> None:
        self.num_input_tokens += request.num_input
        self.num_output_tokens += request.num_output
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
    """Did a completed request keep what it was promised?"""
    ttft_s, tpot_s = request.ttft_s, request.tpot_s
    late = request.ttft_goal_s is not None and ttft_s is not None and ttft_s > request.ttft_goal_s
    slow = request.tpot_goal_s is not None and tpot_s is not None and tpot_s > request.tpot_goal_s
    return not (late or slow)
