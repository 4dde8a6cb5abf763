"""GGUF files: header to config.json, tensors by canonical names, blocks to numbers, conversion to a folder."""
