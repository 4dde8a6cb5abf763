"""Opening of a process's metrics: a port for scrapers, an OTLP collector, or neither."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pdmesh.runtime.addresses import bare_host
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.metrics import OFF, Metrics
from pdmesh.runtime.telemetry.spans import Attributes

logger = logging.getLogger(__name__)


def open_metrics(config: TelemetryConfig, service: str, resource: Attributes, env: Mapping[str, str], *, host: str) -> Metrics:
    """Return the metrics, `OFF` unless there is a port for scrapers or a collector. `service` is the name of this kind of
    process, `resource` identifies the instance, `host` is where it listens unless `config` says so. Raises ConfigError."""
    try:
        endpoint = config.endpoint(env)
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise ConfigError(name, problem) from error
    if endpoint is None and config.metrics_port is None:
        return OFF
    from pdmesh.runtime.telemetry.metrics_exporters import (
        LiveMetrics,  # imports Prometheus' client, which is useless without an exporter
    )

    metrics = LiveMetrics(service, resource)
    if config.metrics_port is not None:
        metrics.listen(bare_host(config.metrics_host or host), config.metrics_port)
    if endpoint is not None:
        from pdmesh.runtime.telemetry.metrics_otlp import open_exporter

        metrics.send_by(open_exporter(endpoint, service, resource, env))
        logger.info("metrics go to %s", endpoint.target)
    return metrics
