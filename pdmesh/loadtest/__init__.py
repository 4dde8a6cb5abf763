"""The load test: an open loop, in which requests start when they are due; latencies count from then.

workload (pure: what, when) ─► runner ─► target (gRPC or OpenAI) ─► records ─► stats (pure) ─► JSON, terminal, HTML
"""
