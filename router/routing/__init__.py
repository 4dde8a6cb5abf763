"""Routing: which decode worker, which prefill worker, aggregated or disaggregated. Pure."""
