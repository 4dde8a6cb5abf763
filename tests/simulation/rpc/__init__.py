"""A simulated grpc.aio."""
