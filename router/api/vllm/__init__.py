"""`vllm.grpc.engine.VllmEngine` in front of the mesh: a gateway (SMG, llm-d) takes the mesh for one engine."""
