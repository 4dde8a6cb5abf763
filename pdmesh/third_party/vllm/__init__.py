"""Stubs of vLLM's engine protocol (package `vllm.grpc.engine`)."""
