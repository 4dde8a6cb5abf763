"""The service chassis: configuration, errors, gRPC servers and channels, processes, the registry. It knows no models."""
