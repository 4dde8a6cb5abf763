"""`make bench-models`: every family of docs/models.md with the tokens of transformers, and the speed of six beside llama.cpp."""
