"""What a process counts and measures, for Prometheus and for OTLP: instruments, and how they are filled.

    STEPS = counter("pdmesh.engine.steps", "Steps of the engine", labels=("kind",))
    TTFT = histogram("gen_ai.server.time_to_first_token", "…", unit="s", labels=("gen_ai.request.model",), buckets=SECONDS)

    metrics = open_metrics(config.telemetry, "pdmesh-worker", resource, os.environ, host=config.host)
    metrics.add(STEPS, 1, "decode")
    metrics.observe(TTFT, 0.21, "smollm2", trace=span.context.trace_name)     # an exemplar: the bucket names that trace
    metrics.read_by(lambda readings: readings.put(FREE_BLOCKS, pool.num_free))    # what is known anyway: asked at each scrape
    url = await metrics.start()

Names are OpenTelemetry's; Prometheus sees `gen_ai_server_time_to_first_token_seconds`. Where nobody is to see anything there is
`OFF`: the same methods, which do nothing; neither Prometheus' client nor OpenTelemetry is imported.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.spans import Attributes

logger = logging.getLogger(__name__)

_SUFFIXES = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}


class Kind(enum.Enum):
    """What the value of an instrument means."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)  # each is one, and quickly found
class Instrument:
    """One name of the catalogue. `unit` as in UCUM: s, By, 1 (a ratio), {token}; `buckets`: upper bounds of a histogram."""

    name: str
    help: str
    kind: Kind
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """As Prometheus names it; a counter's samples end in _total besides."""
        return self.name.replace(".", "_") + _SUFFIXES.get(self.unit, "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """As Prometheus names them."""
        return tuple(label.replace(".", "_") for label in self.labels)

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples, for whoever asks Prometheus."""
        if self.kind is Kind.COUNTER:
            return (f"{self.family}_total",)
        if self.kind is Kind.GAUGE:
            return (self.family,)
        return tuple(f"{self.family}_{what}" for what in ("bucket", "count", "sum"))


def counter(name: str, help: str, labels: tuple[str, ...] = (), unit: str = "") -> Instrument:
    """Something that only grows."""
    return Instrument(name, help, Kind.COUNTER, labels, unit)


def gauge(name: str, help: str, labels: tuple[str, ...] = (), unit: str = "") -> Instrument:
    """Something that goes up and down."""
    return Instrument(name, help, Kind.GAUGE, labels, unit)


def histogram(name: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = (), unit: str = "") -> Instrument:
    """A distribution. `buckets`: upper bounds, ascending, without infinity."""
    return Instrument(name, help, Kind.HISTOGRAM, labels, unit, buckets)


class Readings(Protocol):
    """What a reader fills at each scrape."""

    def put(self, instrument: Instrument, value: float, *labels: str) -> None:
        """A counter's or gauge's value now. Several for the same labels add up."""


Reader = Callable[[Readings], None]
"""Called on the event loop on which the metrics were started: it may look at whatever lives there. Quick, and never raises."""


class Metrics:
    """The instruments of one process: nobody sees these. `add` and `observe` may be called on any thread."""

    is_on = False

    def add(self, instrument: Instrument, amount: float, *labels: str) -> None:
        """A counter grows."""

    def observe(self, instrument: Instrument, value: float, *labels: str, trace: str = "") -> None:
        """A histogram gets one more; `trace`: id of a trace that is an example of it, "" without one."""

    def read_by(self, reader: Reader) -> None:
        """Asked whenever somebody wants to see."""

    async def start(self) -> str:
        """Where Prometheus finds it: "http://host:port/metrics", "" where it is not to. Raises ConfigError."""
        return ""

    async def stop(self) -> None:
        """Sends the last figures, for a moment, and closes the port. Idempotent."""


OFF = Metrics()


def open_metrics(config: TelemetryConfig, service: str, resource: Attributes, env: Mapping[str, str], *, host: str) -> Metrics:
    """`OFF` unless there is a port for scrapers or a collector. `service` is the name of this kind of process, `resource` says
    which of them it is, `host` is where it listens unless `config` says so. Raises ConfigError."""
    try:
        endpoint = config.endpoint(env)
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise ConfigError(name, problem) from error
    if endpoint is None and config.metrics_port is None:
        return OFF
    from pdmesh.runtime.telemetry.metrics_exporters import (
        LiveMetrics,  # imports Prometheus' client, for nothing where nobody looks
    )

    metrics = LiveMetrics(service, resource)
    if config.metrics_port is not None:
        metrics.listen((config.metrics_host or host).strip("[]"), config.metrics_port)
    if endpoint is not None:
        from pdmesh.runtime.telemetry.metrics_otlp import open_exporter

        metrics.send_by(open_exporter(endpoint, service, resource, env))
        logger.info("metrics go to %s", endpoint.target)
    return metrics
