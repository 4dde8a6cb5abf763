"""A collector as small as can be: takes metrics by OTLP over gRPC and remembers the latest of each, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2


class OtlpMetricsReceiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Listens on loopback inside `with`."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.resources: list[dict[str, str]] = []
        self._metrics: dict[str, metrics_pb2.Metric] = {}
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._server.stop(None).wait()

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        with self._changed:
            self.num_calls += 1
            for one in request.resource_metrics:
                self.resources.append({each.key: each.value.string_value for each in one.resource.attributes})
                self._metrics |= {metric.name: metric for scope in one.scope_metrics for metric in scope.metrics}
            self._changed.notify_all()
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def wait(
        self, enough: Callable[[Mapping[str, metrics_pb2.Metric]], bool], timeout_s: float = 20.0
    ) -> dict[str, metrics_pb2.Metric]:
        """Until what has come is `enough`; by name. Blocks. AssertionError after the time."""
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self._metrics), timeout_s), sorted(self._metrics)
            return dict(self._metrics)
