"""Instruments on Prometheus' client: a registry of this process, whose label sets are bounded.

A label takes MAX_VALUES values, those that came first; what comes later is counted as "other", so that nobody who names himself
(tenants do) can fill the memory of whoever stores the figures. And no instrument has more than MAX_SERIES sets of labels.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from runtime.telemetry.metrics import Instrument, Kind

OTHER = "other"
MAX_VALUES = 64
MAX_VALUES_OF: Mapping[str, int] = {"worker": 256}
MAX_SERIES = 1000
MAX_CHARS = 100

Labels = tuple[str, ...]
Series = prometheus_client.Counter | prometheus_client.Histogram


class LabelGuard:
    """Which values of labels are told apart: the same for all instruments, so that their figures can be put together."""

    def __init__(self, max_values: int = MAX_VALUES, max_values_of: Mapping[str, int] = MAX_VALUES_OF) -> None:
        self._max_values, self._max_values_of = max_values, max_values_of
        self._known: defaultdict[str, set[str]] = defaultdict(set)
        self._lock = threading.Lock()

    def fold(self, names: Sequence[str], values: Labels) -> Labels:
        """`values` of the labels `names`, one or more of them "other"."""
        return tuple([self._fold(name, value) for name, value in zip(names, values, strict=True)])

    def _fold(self, name: str, value: str) -> str:
        known = self._known[name]
        if value in known:
            return value
        with self._lock:
            if len(known) >= self._max_values_of.get(name, self._max_values) or len(value) > MAX_CHARS:
                return OTHER
            known.add(value)
        return value


class Registry:
    """Counters and histograms, which may be used on any thread; `families` of them."""

    def __init__(self, guard: LabelGuard | None = None, max_series: int = MAX_SERIES) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.guard = guard or LabelGuard()
        self.catalogue: dict[str, Instrument] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._max_series = max_series
        self._parents: dict[str, Series] = {}
        self._series: dict[tuple[str, Labels], Series] = {}
        self._num_series: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()
        ProcessCollector(registry=self._registry)

    def add(self, instrument: Instrument, amount: float, labels: Labels) -> None:
        """A counter grows."""
        series = self._series.get((instrument.name, labels)) or self._find(instrument, labels)
        assert isinstance(series, prometheus_client.Counter), f"{instrument.name} is no counter"
        series.inc(amount)

    def observe(self, instrument: Instrument, value: float, labels: Labels, trace: str) -> None:
        """A histogram gets one more."""
        series = self._series.get((instrument.name, labels)) or self._find(instrument, labels)
        assert isinstance(series, prometheus_client.Histogram), f"{instrument.name} is no histogram"
        series.observe(value, {"trace_id": trace} if trace else None)

    def families(self) -> list[Metric]:
        """As they are now, the process's own figures among them."""
        return list(self._registry.collect())

    def note(self, instrument: Instrument) -> None:
        """It belongs to the catalogue of this process."""
        self.catalogue[instrument.family] = instrument

    def _find(self, instrument: Instrument, labels: Labels) -> Series:
        """The series of these labels, or that of others where there are too many. Labels are remembered only where they stay as
        they are: those that are folded have no end."""
        folded = self.guard.fold(instrument.labels, labels)
        with self._lock:
            if (instrument.name, folded) not in self._series and self._num_series[instrument.name] >= self._max_series:
                folded = (OTHER,) * len(labels)
            series = self._series.get((instrument.name, folded))
            if series is None:
                parent = self._parent(instrument)
                series = self._series[instrument.name, folded] = parent.labels(*folded) if labels else parent
                self._num_series[instrument.name] += 1
            return series

    def _parent(self, instrument: Instrument) -> Series:
        parent = self._parents.get(instrument.name)
        if parent is None:
            self.note(instrument)
            parent = self._parents[instrument.name] = self._made(instrument)
        return parent

    def _made(self, instrument: Instrument) -> Series:
        name, labels = instrument.family, instrument.label_names
        if instrument.kind is Kind.HISTOGRAM:
            bounds = instrument.buckets
            return prometheus_client.Histogram(name, instrument.help, labels, registry=self._registry, buckets=bounds)
        return prometheus_client.Counter(name, instrument.help, labels, registry=self._registry)


class Reading:
    """What readers say at one moment."""

    def __init__(self, registry: Registry, max_series: int = MAX_SERIES) -> None:
        self._registry = registry
        self._max_series = max_series
        self._values: dict[Instrument, dict[Labels, float]] = {}

    def put(self, instrument: Instrument, value: float, *labels: str) -> None:
        """See `metrics.Readings`."""
        values = self._values.setdefault(instrument, {})
        folded = self._registry.guard.fold(instrument.labels, labels)
        if folded not in values and len(values) >= self._max_series:
            folded = (OTHER,) * len(labels)
        values[folded] = values.get(folded, 0.0) + value

    def families(self) -> Iterable[Metric]:
        """In the order in which they came."""
        for instrument, values in self._values.items():
            self._registry.note(instrument)
            cls = CounterMetricFamily if instrument.kind is Kind.COUNTER else GaugeMetricFamily
            family = cls(instrument.family, instrument.help, labels=instrument.label_names)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
