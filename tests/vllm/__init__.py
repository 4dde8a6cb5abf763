"""What only vLLM has as the engine of a worker."""
