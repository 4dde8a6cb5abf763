"""Sends the metrics by OTLP over gRPC, every PERIOD_S, to collectors that do not scrape.

They are encoded here and not by OpenTelemetry's SDK, whose instruments would count everything a second time. All sums are
cumulative, from the start of the process. An unreachable collector costs a failed call; figures are not kept for it, since the
next ones contain them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar, Sample

from pdmesh.runtime.telemetry.config import Endpoint
from pdmesh.runtime.telemetry.metrics import Instrument
from pdmesh.runtime.telemetry.otlp import SCOPE, encode_resource, headers, open_channel
from pdmesh.runtime.telemetry.spans import Attributes

PERIOD_S = 10.0
CALL_TIMEOUT_S = 3.0
_CUMULATIVE = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
_UNITS = {"seconds": "s", "bytes": "By"}
Catalogue = Mapping[str, Instrument]
"""Instruments by their name in Prometheus."""

logger = logging.getLogger(__name__)


def open_exporter(endpoint: Endpoint, service: str, resource: Attributes, env: Mapping[str, str]) -> OtlpMetricsExporter:
    """Return an exporter to the collector at `endpoint`. Raises ConfigError for certificates that cannot be read."""
    return OtlpMetricsExporter(open_channel(endpoint, env), encode_resource(service, resource, env), headers(env))


class OtlpMetricsExporter:
    """Collect and send on a thread."""

    def __init__(
        self,
        channel: grpc.Channel,
        resource: resource_pb2.Resource,
        metadata: Iterable[tuple[str, str]] = (),
        period_s: float = PERIOD_S,
    ) -> None:
        self._channel, self._resource, self._metadata, self._period_s = channel, resource, tuple(metadata), period_s
        self._stub = metrics_service_pb2_grpc.MetricsServiceStub(channel)  # type: ignore[no-untyped-call]
        self._began_ns = time.time_ns()
        self._closing = threading.Event()
        self._is_reachable = True
        self._thread: threading.Thread | None = None

    def start(self, look: Callable[[], list[Metric]], catalogue: Catalogue) -> None:
        """Start; see `metrics_exporters.Exporter`."""
        self._thread = threading.Thread(target=self._run, args=(look, catalogue), name="metrics-otlp", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Close; see `metrics_exporters.Exporter`. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._channel.close()

    def _run(self, look: Callable[[], list[Metric]], catalogue: Catalogue) -> None:
        while not self._closing.is_set():
            self._closing.wait(self._period_s)
            try:
                families = look()
            except (TimeoutError, RuntimeError):  # busy or stopping; the next period tries again
                continue
            self._send(encode_request(families, catalogue, self._resource, self._began_ns, time.time_ns()))

    def _send(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        try:
            self._stub.Export(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
            self._note(None)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                logger.info("the collector takes no metrics, only other signals: none are sent")
                self._closing.set()
                return
            self._note(f"{error.code().name}: {error.details()}")
        except ValueError:  # the channel was closed meanwhile
            return

    def _note(self, problem: str | None) -> None:
        """Log one line when failures begin and one when they end."""
        if (problem is None) != self._is_reachable:
            self._is_reachable = problem is None
            if problem is None:
                logger.info("the collector takes metrics again")
            else:
                logger.warning("the collector does not take metrics: %s", problem)


def encode_request(
    families: Iterable[Metric], catalogue: Catalogue, resource: resource_pb2.Resource, began_ns: int, now_ns: int
) -> metrics_service_pb2.ExportMetricsServiceRequest:
    """Encode the families. Times are of the wall clock."""
    metrics = [_metric(family, catalogue.get(family.name), began_ns, now_ns) for family in families if family.samples]
    scope = metrics_pb2.ScopeMetrics(scope=common_pb2.InstrumentationScope(name=SCOPE), metrics=metrics)
    return metrics_service_pb2.ExportMetricsServiceRequest(
        resource_metrics=[metrics_pb2.ResourceMetrics(resource=resource, scope_metrics=[scope])]
    )


def _metric(family: Metric, instrument: Instrument | None, began_ns: int, now_ns: int) -> metrics_pb2.Metric:
    """Encode one metric. One outside our catalogue (the process's own figures) keeps Prometheus' names."""
    names = {} if instrument is None else dict(zip(instrument.label_names, instrument.labels, strict=True))
    name, unit = (family.name, _unit(family.name)) if instrument is None else (instrument.name, instrument.unit)
    metric = metrics_pb2.Metric(name=name, description=family.documentation, unit=unit)
    if family.type == "histogram":
        points = _histogram_points(family.samples, names, began_ns, now_ns)
        metric.histogram.CopyFrom(metrics_pb2.Histogram(data_points=points, aggregation_temporality=_CUMULATIVE))
        return metric
    numbers = [_number(sample, names, began_ns, now_ns) for sample in family.samples]
    if family.type == "counter":
        metric.sum.CopyFrom(metrics_pb2.Sum(data_points=numbers, aggregation_temporality=_CUMULATIVE, is_monotonic=True))
    else:
        metric.gauge.CopyFrom(metrics_pb2.Gauge(data_points=numbers))
    return metric


def _number(sample: Sample, names: Mapping[str, str], began_ns: int, now_ns: int) -> metrics_pb2.NumberDataPoint:
    return metrics_pb2.NumberDataPoint(
        attributes=_attributes(sample.labels, names),
        start_time_unix_nano=began_ns,
        time_unix_nano=now_ns,
        as_double=sample.value,
    )


def _histogram_points(
    samples: Iterable[Sample], names: Mapping[str, str], began_ns: int, now_ns: int
) -> list[metrics_pb2.HistogramDataPoint]:
    """Encode samples that come series by series, each with its buckets in order, as Prometheus' client gives them."""
    points: dict[frozenset[tuple[str, str]], metrics_pb2.HistogramDataPoint] = {}
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        point = points.get(frozenset(labels.items()))
        if point is None:
            point = points[frozenset(labels.items())] = metrics_pb2.HistogramDataPoint(
                attributes=_attributes(labels, names), start_time_unix_nano=began_ns, time_unix_nano=now_ns
            )
        _add_sample(point, sample)
    for point in points.values():  # with bounds below zero, Prometheus' client gives neither count nor sum
        point.count = sum(point.bucket_counts)
    return list(points.values())


def _add_sample(point: metrics_pb2.HistogramDataPoint, sample: Sample) -> None:
    """Add a sample: Prometheus' buckets are cumulative, OTLP's are not."""
    if sample.name.endswith("_sum"):
        point.sum = sample.value
    elif sample.name.endswith("_bucket"):
        point.bucket_counts.append(round(sample.value) - sum(point.bucket_counts))
        if sample.labels["le"] != "+Inf":
            point.explicit_bounds.append(float(sample.labels["le"]))
        if sample.exemplar is not None:
            point.exemplars.append(_exemplar(sample.exemplar))


def _exemplar(exemplar: Exemplar) -> metrics_pb2.Exemplar:
    """Encode the exemplar of a trace; the span is not known."""
    return metrics_pb2.Exemplar(
        trace_id=bytes.fromhex(exemplar.labels.get("trace_id", "")),
        as_double=exemplar.value,
        time_unix_nano=round(float(exemplar.timestamp or 0.0) * 1e9),
    )


def _attributes(labels: Mapping[str, str], names: Mapping[str, str]) -> list[common_pb2.KeyValue]:
    """Return the attributes; an empty label is omitted."""
    return [
        common_pb2.KeyValue(key=names.get(name, name), value=common_pb2.AnyValue(string_value=value))
        for name, value in labels.items()
        if value
    ]


def _unit(name: str) -> str:
    return next((unit for word, unit in _UNITS.items() if name.endswith(f"_{word}")), "")
