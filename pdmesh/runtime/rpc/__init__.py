"""gRPC servers and channels: interceptors, health, limits, TLS."""
