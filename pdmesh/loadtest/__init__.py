"""The load test: requests start when they are due, whatever became of the others; latencies count from when they were due.

workload (pure: what, when) ─► runner ─► target (gRPC or OpenAI) ─► records ─► stats (pure) ─► JSON, terminal, HTML
"""
