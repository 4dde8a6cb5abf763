"""What a process says of itself: traces and metrics. The only place that knows OpenTelemetry and Prometheus' client."""
