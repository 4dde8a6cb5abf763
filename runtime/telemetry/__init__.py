"""What a process says of itself: traces over OTLP. The only place that knows OpenTelemetry."""
