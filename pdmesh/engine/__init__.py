"""Inference: tensors and token ids in, tokens out. No network, no protobuf, no OpenTelemetry."""
