"""The telemetry of a process: traces and metrics. The only place that knows OpenTelemetry and Prometheus' client."""
