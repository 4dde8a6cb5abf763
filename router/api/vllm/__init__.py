"""`vllm.grpc.engine.VllmEngine` in front of the mesh: to a gateway (SMG, llm-d) the mesh looks like one engine."""
