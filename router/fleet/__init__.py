"""The workers that this router knows: registry, streams, heartbeats, circuit breaker, migration; and its peer routers."""
