"""The autoscaler on Kubernetes, against an API server in this process; the real one is in tests/cluster."""
