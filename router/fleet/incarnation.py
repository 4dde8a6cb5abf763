"""One process of a worker, from its first heartbeat until it is lost: what it said of itself, and what was counted of it."""

import math
import time
from dataclasses import dataclass, field

from pdmesh.adapter_id import AdapterId
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.v1 import common_pb2, worker_pb2
from router.fleet.change_notifier import Signal
from router.routing import worker_reports
from router.routing.cost_model import DEFAULT_CHUNK

STOPPED = frozenset((worker_pb2.SERVING_STATE_PAUSED, worker_pb2.SERVING_STATE_ASLEEP))


@dataclass(eq=False)
class KVReuse:
    """Count what a worker process fetched and restored for requests of this router. `saved_s`: computing that would have taken so
    much longer, by its own latency model."""

    num_fetched_tokens: int = 0
    num_restored_tokens: int = 0
    saved_s: float = 0.0

    def add(self, timings: common_pb2.PrefillTimings, speed: LatencyModel | None, chunk: int) -> None:
        """Add what one prompt took from elsewhere. `chunk`: the tokens of a step."""
        num_moved = timings.num_fetched_tokens + timings.num_restored_tokens
        took_s = (timings.fetch_ns + timings.restore_ns) / 1e9
        if not num_moved and not took_s:
            return
        self.num_fetched_tokens += timings.num_fetched_tokens
        self.num_restored_tokens += timings.num_restored_tokens
        if speed is not None:
            last = timings.num_cached_tokens
            self.saved_s += speed.prefill_s(max(0, last - num_moved), last, chunk=chunk) - took_s


@dataclass(eq=False)
class Incarnation:
    """Hold a worker process as long as it is heard. `lost` is set when all of its streams are silent, and when its Watch stream
    has ended and cannot be opened again, or its stream of tokens has ended as well."""

    info: worker_pb2.WorkerInfo
    load: worker_pb2.LoadReport
    reported_at: float
    stopped_at: float = -math.inf  # monotonic seconds: when it was last seen to be paused or asleep
    late_at: float = -math.inf  # monotonic seconds: when a heartbeat last came late
    lost: Signal = field(default_factory=Signal)
    described: worker_reports.Described = field(init=False)
    first_weights: str = field(init=False)  # the hash that it had when it was first heard
    former_weights: tuple[str, float] = ("", -math.inf)  # hash, and when others replaced them (monotonic seconds)
    reuse: KVReuse = field(default_factory=KVReuse)
    _told_adapters: dict[str, tuple[common_pb2.AdapterInfo | None, float]] = field(default_factory=dict)  # by name, and when

    def prefilled(self, timings: common_pb2.PrefillTimings) -> None:
        """Count what it fetched and restored for a prompt."""
        chunk = self.info.max_num_batched_tokens or DEFAULT_CHUNK
        self.reuse.add(timings, worker_reports.latency_of(self.load), chunk)

    def replaced_weights(self, weights_hash: str) -> None:
        """Take the worker as one of another identity from now on: it computes new requests with other weights."""
        self.former_weights = (self.info.identity.weights_hash, time.monotonic())
        info = worker_pb2.WorkerInfo()
        info.CopyFrom(self.info)
        info.identity.weights_hash = weights_hash
        self.info, self.described = info, worker_reports.describe(info)

    def told_adapter(self, name: str, info: common_pb2.AdapterInfo | None) -> None:
        """Count that the worker has said it has an adapter, or none of that name, before its next report does."""
        self._told_adapters[name] = (info, time.monotonic())
        _put_adapter(self.load, name, info)

    def corrected(self, load: worker_pb2.LoadReport, since: float) -> worker_pb2.LoadReport:
        """Return a report with the adapters that it may have been made too early to contain: what the worker has answered after
        `since` (monotonic seconds)."""
        self._told_adapters = {name: told for name, told in self._told_adapters.items() if told[1] >= since}
        for name, (info, _) in self._told_adapters.items():
            _put_adapter(load, name, info)
        return load

    @property
    def longest_step_s(self) -> float:
        """Return the predicted time of a step full of prompts; 0 while the worker does not report its speed."""
        model = worker_reports.latency_of(self.load)
        return 0.0 if model is None else model.longest_step_s(self.info.max_num_batched_tokens)

    def was_late_since(self, then: float) -> bool:
        """Return whether a heartbeat came late after `then` (monotonic seconds): the process, or this one, had no time."""
        return self.late_at >= then

    @property
    def is_stopped(self) -> bool:
        """Return whether it is paused or asleep, by its last report."""
        return self.load.serving_state in STOPPED

    def was_stopped_since(self, then: float) -> bool:
        """Return whether it was paused or asleep after `then` (monotonic seconds): it has taken longer through no fault."""
        return self.is_stopped or self.stopped_at >= then

    def __post_init__(self) -> None:
        self.described = worker_reports.describe(self.info)
        self.first_weights = self.info.identity.weights_hash

    @property
    def adapters(self) -> frozenset[AdapterId]:
        """Return the LoRA adapters that requests may ask for, by its last report."""
        return worker_reports.adapters_of(self.load)


def _put_adapter(load: worker_pb2.LoadReport, name: str, info: common_pb2.AdapterInfo | None) -> None:
    """Have a report say that the worker has this adapter, or none of that name."""
    others = [each for each in load.adapters if each.name != name]
    del load.adapters[:]
    load.adapters.extend(others if info is None else [*others, info])
