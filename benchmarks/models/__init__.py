"""`make bench-models`: every family of docs/models.md with the tokens of transformers, the speed of six beside llama.cpp, and
what quantized formats cost."""
