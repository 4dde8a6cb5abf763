"""What pdmesh's autoscaler is compared with: a fixed pool and Kubernetes' horizontal pod autoscaler. Pure: the time is passed in.

NVIDIA Dynamo's planner is in `dynamo.py` beside it.
"""

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Fixed:
    """So many replicas, whatever comes."""

    replicas: int

    def decide(self, now_s: float) -> int:
        """Replicas wanted."""
        return self.replicas


@dataclass(frozen=True)
class HpaSettings:
    """The defaults of autoscaling/v2 ("Horizontal Pod Autoscaling", kubernetes.io; API reference of HPAScalingRules): tolerance
    10 %; up by 100 % or 4 pods within 15 s, whichever is more, without stabilization; down by 100 % within 15 s, no further than
    the highest recommendation of 300 s. A decision every 15 s (--horizontal-pod-autoscaler-sync-period) is the caller's."""

    target: float
    min_replicas: int = 1
    max_replicas: int = 64
    tolerance: float = 0.1
    down_stabilization_s: float = 300.0
    up_percent: float = 100.0
    up_pods: int = 4
    period_s: float = 15.0

    def __post_init__(self) -> None:
        if not self.target > 0:
            raise ValueError(f"target: {self.target} is not more than 0")


class Hpa:
    """One HorizontalPodAutoscaler. Ask it by one of the two kinds of metric; do not mix them."""

    def __init__(self, settings: HpaSettings) -> None:
        self._settings = settings
        self._recommended: deque[tuple[float, int]] = deque()
        self._grown: deque[tuple[float, int]] = deque()

    def by_utilization(self, now_s: float, utilization: float, num_ready: int, num_starting: int) -> int:
        """Resource metric, as of CPU: `utilization` is the mean of the pods that are ready, in units of what they request.

        ceil(current · value / target) over ready pods. Where that is up, pods that are not ready count as if they used nothing,
        and where that turns the direction or falls within the tolerance, nothing changes ("Algorithm details" of that page)."""
        settings, current = self._settings, num_ready + num_starting
        ratio = utilization / settings.target
        if num_ready == 0 or abs(ratio - 1) <= settings.tolerance:
            return self._behave(now_s, current, current)
        if ratio < 1 or num_starting == 0:
            return self._behave(now_s, current, math.ceil(ratio * num_ready - 1e-9))
        diluted = ratio * num_ready / current
        wanted = current if diluted <= 1 + settings.tolerance else math.ceil(diluted * current - 1e-9)
        return self._behave(now_s, current, max(current, wanted))

    def by_queue(self, now_s: float, queued: float, current: int) -> int:
        """External metric with an average value, as of requests that wait: ceil(all of it / target for each replica), unless that
        is within the tolerance of what each replica has now."""
        settings = self._settings
        ratio = queued / (settings.target * current) if current else math.inf
        if abs(ratio - 1) <= settings.tolerance:
            return self._behave(now_s, current, current)
        return self._behave(now_s, current, math.ceil(queued / settings.target - 1e-9))

    def _behave(self, now_s: float, current: int, wanted: int) -> int:
        """Bounds, stabilization, policies."""
        settings = self._settings
        wanted = min(settings.max_replicas, max(settings.min_replicas, wanted))
        if not self._recommended:  # what there is when it begins counts as recommended (recordInitialRecommendation)
            self._recommended.append((now_s, current))
        self._recommended.append((now_s, wanted))
        while self._recommended[0][0] <= now_s - settings.down_stabilization_s:
            self._recommended.popleft()
        if wanted < current:
            wanted = min(current, max(num for _, num in self._recommended))
        if wanted <= current:
            return wanted
        limited = min(wanted, self._most(now_s, current))
        self._grown.append((now_s, limited - current))
        return max(limited, current)

    def _most(self, now_s: float, current: int) -> int:
        """Of the size at the beginning of the period, the larger of the two policies."""
        settings = self._settings
        while self._grown and self._grown[0][0] <= now_s - settings.period_s:
            self._grown.popleft()
        before = current - sum(num for _, num in self._grown)
        return max(before + settings.up_pods, math.ceil(before * (1 + settings.up_percent / 100)))
