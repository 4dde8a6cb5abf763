"""The metrics of a process, for Prometheus and for OTLP: instruments, and how they are filled.

    STEPS = counter("pdmesh.engine.steps", "Steps of the engine", labels=("kind",))
    TTFT = histogram("gen_ai.server.time_to_first_token", "…", unit="s", labels=("gen_ai.request.model",), buckets=SECONDS)

    metrics = open_metrics(config.telemetry, "pdmesh-worker", resource, os.environ, host=config.host)
    metrics.add(STEPS, 1, "decode")
    metrics.observe(TTFT, 0.21, "smollm2", trace=span.context.trace_name)     # an exemplar: the bucket names that trace
    metrics.read_by(lambda readings: readings.put(FREE_BLOCKS, pool.num_free))    # known state: read at each scrape
    url = await metrics.start()

Names are OpenTelemetry's; Prometheus sees `gen_ai_server_time_to_first_token_seconds`. Without a scraper port or collector there
is `OFF`: the same methods, which do nothing; neither Prometheus' client nor OpenTelemetry is imported.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

_SUFFIXES = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}


class Kind(enum.Enum):
    """Name the kind of an instrument's value."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)  # identity hash: fast look-up
class Instrument:
    """Describe one metric of the catalogue. `unit` as in UCUM: s, By, 1 (a ratio), {token}; `buckets`: upper bounds of a
    histogram."""

    name: str
    help: str
    kind: Kind
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """Return the name in Prometheus; a counter's samples end in _total besides."""
        return self.name.replace(".", "_") + _SUFFIXES.get(self.unit, "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the labels' names in Prometheus."""
        return tuple(label.replace(".", "_") for label in self.labels)

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the names of its samples, for queries to Prometheus."""
        if self.kind is Kind.COUNTER:
            return (f"{self.family}_total",)
        if self.kind is Kind.GAUGE:
            return (self.family,)
        return tuple(f"{self.family}_{what}" for what in ("bucket", "count", "sum"))


def counter(name: str, help: str, labels: tuple[str, ...] = (), unit: str = "") -> Instrument:
    """Return a counter, which only grows."""
    return Instrument(name, help, Kind.COUNTER, labels, unit)


def gauge(name: str, help: str, labels: tuple[str, ...] = (), unit: str = "") -> Instrument:
    """Return a gauge, which goes up and down."""
    return Instrument(name, help, Kind.GAUGE, labels, unit)


def histogram(name: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = (), unit: str = "") -> Instrument:
    """Return a histogram. `buckets`: upper bounds, ascending, without infinity."""
    return Instrument(name, help, Kind.HISTOGRAM, labels, unit, buckets)


class Readings(Protocol):
    """Collect what a reader reports at each scrape."""

    def put(self, instrument: Instrument, value: float, *labels: str) -> None:
        """Add a counter's or gauge's current value. Several for the same labels add up."""


Reader = Callable[[Readings], None]
"""Called on the event loop on which the metrics were started: it may read any state there. It is quick and never raises."""


class Metrics:
    """Hold the instruments of one process; this base class exports nothing. `add` and `observe` may be called on any thread."""

    is_on = False

    def add(self, instrument: Instrument, amount: float, *labels: str) -> None:
        """Increase a counter."""

    def observe(self, instrument: Instrument, value: float, *labels: str, trace: str = "") -> None:
        """Add an observation to a histogram; `trace`: id of a trace that is an example of it, "" without one."""

    def read_by(self, reader: Reader) -> None:
        """Call the reader at each scrape."""

    async def start(self) -> str:
        """Start exporting; return the URL for Prometheus, "http://host:port/metrics", or "" without one. Raises ConfigError."""
        return ""

    async def stop(self) -> None:
        """Send the last figures, for a moment, and close the port. Idempotent."""


OFF = Metrics()
