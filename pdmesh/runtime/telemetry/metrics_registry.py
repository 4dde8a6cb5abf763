"""Holds counters and histograms of this process, with bounded label sets, as families that Prometheus' client formats.

A label takes its first MAX_VALUES values; later ones are counted as "other", so that a client that chooses names (tenants do)
cannot fill the memory of the metrics store. No instrument has more than MAX_SERIES sets of labels.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from pdmesh.runtime.telemetry.metrics import Instrument, Kind

OTHER = "other"
MAX_VALUES = 64
MAX_VALUES_OF: Mapping[str, int] = {"worker": 256}
MAX_SERIES = 1000
MAX_CHARS = 100

Labels = tuple[str, ...]


class LabelGuard:
    """Decide which label values are kept: the same for all instruments, so that their figures can be joined."""

    def __init__(self, max_values: int = MAX_VALUES, max_values_of: Mapping[str, int] = MAX_VALUES_OF) -> None:
        self._max_values, self._max_values_of = max_values, max_values_of
        self._known: defaultdict[str, set[str]] = defaultdict(set)
        self._lock = threading.Lock()

    def fold(self, names: Sequence[str], values: Labels) -> Labels:
        """Return `values` of the labels `names`, with excess ones replaced by "other"."""
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


class Distribution:
    """Hold a histogram's series: the count in each bucket, observations beyond the last bound at the end."""

    __slots__ = ("bounds", "counts", "examples", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.examples: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, trace: str) -> None:
        """Add an observation."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace:
            self.examples[bucket] = Exemplar({"trace_id": trace}, value, time.time())

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Return the buckets as Prometheus has them: cumulative."""
        found = list[tuple[str, float] | tuple[str, float, Exemplar]]()
        ends = [*map(floatToGoString, self.bounds), "+Inf"]
        for end, count, example in zip(ends, accumulate(self.counts), self.examples, strict=True):
            found.append((end, float(count)) if example is None else (end, float(count), example))
        return found


class Registry:
    """Hold counters and histograms, which may be used on any thread; return their `families`.

    They are counted here, in a microsecond, and not by Prometheus' client, which takes several: it only formats them."""

    def __init__(self, guard: LabelGuard | None = None, max_series: int = MAX_SERIES) -> None:
        self.guard = guard or LabelGuard()
        self.catalogue: dict[str, Instrument] = {}
        self._process = CollectorRegistry(auto_describe=False)
        self._max_series = max_series
        self._totals: defaultdict[Instrument, dict[Labels, float]] = defaultdict(dict)
        self._distributions: defaultdict[Instrument, dict[Labels, Distribution]] = defaultdict(dict)
        self._lock = threading.Lock()
        ProcessCollector(registry=self._process)

    def add(self, instrument: Instrument, amount: float, labels: Labels) -> None:
        """Increase a counter."""
        with self._lock:
            totals = self._totals[instrument]
            if labels not in totals:
                labels = self._folded(instrument, labels, totals)
            totals[labels] = totals.get(labels, 0.0) + amount

    def observe(self, instrument: Instrument, value: float, labels: Labels, trace: str) -> None:
        """Add an observation to a histogram."""
        with self._lock:
            distributions = self._distributions[instrument]
            series = distributions.get(labels)
            if series is None:
                labels = self._folded(instrument, labels, distributions)
                series = distributions.setdefault(labels, Distribution(instrument.buckets))
            series.observe(value, trace)

    def families(self) -> list[Metric]:
        """Return the current families, including the process's own figures."""
        found: list[Metric] = list(self._process.collect())
        with self._lock:
            totals = [(instrument, dict(series)) for instrument, series in self._totals.items()]
            distributions = [(instrument, list(series.items())) for instrument, series in self._distributions.items()]
        for instrument, series in totals:
            counts = CounterMetricFamily(instrument.family, instrument.help, labels=instrument.label_names)
            for labels, value in series.items():
                counts.add_metric(labels, value)
            found.append(counts)
        for instrument, each in distributions:
            family = HistogramMetricFamily(instrument.family, instrument.help, labels=instrument.label_names)
            for labels, distribution in each:
                family.add_metric(labels, distribution.buckets(), distribution.total)
            found.append(family)
        return found

    def note(self, instrument: Instrument) -> None:
        """Add the instrument to the catalogue of this process."""
        self.catalogue[instrument.family] = instrument

    def _folded(self, instrument: Instrument, labels: Labels, known: Collection[Labels]) -> Labels:
        """Return the labels of the series that counts these, or of "other" if there are too many. Only the folded ones are
        remembered: the raw ones are unbounded."""
        self.note(instrument)
        folded = self.guard.fold(instrument.labels, labels)
        return folded if folded in known or len(known) < self._max_series else (OTHER,) * len(labels)


class Reading:
    """Hold what readers report at one moment."""

    def __init__(self, registry: Registry, max_series: int = MAX_SERIES) -> None:
        self._registry = registry
        self._max_series = max_series
        self._values: dict[Instrument, dict[Labels, float]] = {}

    def put(self, instrument: Instrument, value: float, *labels: str) -> None:
        """Add a value; see `metrics.Readings`."""
        values = self._values.setdefault(instrument, {})
        folded = self._registry.guard.fold(instrument.labels, labels)
        if folded not in values and len(values) >= self._max_series:
            folded = (OTHER,) * len(labels)
        values[folded] = values.get(folded, 0.0) + value

    def families(self) -> Iterable[Metric]:
        """Return the families in order of arrival."""
        for instrument, values in self._values.items():
            self._registry.note(instrument)
            cls = CounterMetricFamily if instrument.kind is Kind.COUNTER else GaugeMetricFamily
            family = cls(instrument.family, instrument.help, labels=instrument.label_names)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
