"""Tensor parallelism: the ranks of one worker share each layer's heads and columns, and the KV of these heads.

Rank 0 is the worker's process: scheduler, sampler, sockets. The others are processes of `rank.py` that it starts (`tp_group.py`).
Each gets every step's batch (`tp_protocol.py`), computes its share of the weights (`split.py`) on its share of the heads
(`share.py`) and exchanges sums with the others (`collectives.py`). Where each rank has a pool of its own they copy
parts of a hand-off together (`staging.py`). docs/parallel.md describes all of it.
"""
