"""`make bench-vllm`: vLLM as the engine of a mesh: the same tokens, figures of a request, other models, others beside it."""
