"""Timings, spans and metrics of requests and of the fleet."""
