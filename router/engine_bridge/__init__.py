"""Stock engines that speak `vllm.grpc.engine.VllmEngine`, each shown to the router as a worker that computes prompts itself."""
