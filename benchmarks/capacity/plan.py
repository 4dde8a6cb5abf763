"""What everybody is asked, and how long: the same words at the same times at a given rate."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from pdmesh.loadtest.arrivals import Distribution, fixed
from pdmesh.loadtest.measure import Measurement, Search
from pdmesh.loadtest.record import ObjectiveBook, Objectives
from pdmesh.loadtest.workload import Limits, TrafficClass, Workload

OUTPUT_TOKENS, MAX_INPUT_TOKENS = 64, 720
OBJECTIVES = Objectives(ttft_ms=500, tpot_ms=40, quantile=0.9)
TRAFFIC = TrafficClass(input_tokens=Distribution("normal", (420, 100)), output_tokens=fixed(OUTPUT_TOKENS))
SEED = 20
# After its confirmation a system is asked at so many times its capacity, too.
ABOVE = 1.15


@dataclass(frozen=True)
class Plan:
    """Seconds of a window, and how closely the capacity is looked for. `tolerance`: as in Search."""

    duration_s: float = 27.0
    warmup_s: float = 3.0
    first_rate: float = 1.0
    min_rate: float = 0.2
    max_rate: float = 64.0
    tolerance: float = 0.07

    def measurement(self, target: str, model: str) -> Measurement:
        """A window, but for its rate. What it says of its own delay is shown: on two cores it shares them with what it loads."""
        workload = Workload(classes=(TRAFFIC,), limits=Limits(MAX_INPUT_TOKENS, OUTPUT_TOKENS))
        settings = {
            "input_tokens": f"{TRAFFIC.input_tokens}, at most {MAX_INPUT_TOKENS}",
            "output_tokens": OUTPUT_TOKENS,
            "arrivals": "poisson",
            "seed": SEED,
        }
        return Measurement(
            workload,
            ObjectiveBook(OBJECTIVES),
            SEED,
            self.duration_s,
            self.warmup_s,
            max_lateness_s=math.inf,
            target=target,
            model=model,
            settings=settings,
        )

    @property
    def search(self) -> Search:
        return self._search(OBJECTIVES.quantile)

    @property
    def strict_search(self) -> Search:
        """Of which only what the other search measured anyway is told."""
        return self._search(0.99)

    @property
    def key(self) -> str:
        """Tells windows of one plan from those of another."""
        return hashlib.sha256(repr((self, TRAFFIC, OBJECTIVES, SEED, MAX_INPUT_TOKENS)).encode()).hexdigest()[:12]

    def _search(self, attainment: float) -> Search:
        return Search(attainment, self.first_rate, self.max_rate, self.min_rate, self.tolerance, windows=1)


FULL = Plan()
# Enough to see that everybody works; not to measure anybody.
QUICK = Plan(duration_s=8.0, warmup_s=1.0, min_rate=0.5, max_rate=8.0, tolerance=0.5)
