"""Attention over the paged KV pool: the interface of backends and the reference in torch."""
