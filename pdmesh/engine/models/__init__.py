"""Decoder models: what a config.json says, layers, and one forward pass for prefill, decode and verification."""
