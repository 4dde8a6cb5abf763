"""Measurements against peers, each with its limit; results are committed in `benchmarks/results`."""
