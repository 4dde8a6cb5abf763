"""Tensor parallelism: the ranks of one worker share each layer's heads and columns, and the KV of these heads.

Rank 0 is the worker's process: scheduler, sampler, sockets. The others are processes of `rank.py` that it starts (`ranks.py`).
Each gets every step's batch (`wire.py`), computes its share of the weights (`split.py`) on its share of the heads
(`attention.py`) and meets the others where sums are needed (`layers.py`, `group.py`). Where each has a pool of its own they copy
parts of a hand-off together (`staging.py`). docs/parallel.md has the whole.
"""
