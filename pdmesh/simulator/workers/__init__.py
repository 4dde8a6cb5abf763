"""A modelled worker: batches, sequences, KV blocks, step times."""
