"""Loading of checkpoints: safetensors and GGUF to quantized, packed or plain weights."""
