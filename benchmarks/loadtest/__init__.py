"""`make bench-loadtest`: what the load test reports of a server whose latencies are known."""
