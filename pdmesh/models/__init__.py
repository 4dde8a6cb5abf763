"""Models by name: the catalogue, downloads, the cache, conversion of GGUF files."""
