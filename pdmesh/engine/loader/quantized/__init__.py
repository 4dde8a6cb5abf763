"""Quantized safetensors checkpoints: which tensors make one weight (docs/quantized_checkpoints.md)."""
