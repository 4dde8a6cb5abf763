"""Calculates what this machine allows at best for each part of a step: its bytes over the measured bandwidth, or its operations
over the measured peak, whichever takes longer. Pure, but for the measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdmesh.engine.kernels.cpu import library
from pdmesh.engine.kernels.cpu.model import NativeModel, PackedExperts, PackedLayer, PackedLinear, PackedMLP
from pdmesh.engine.kv_cache.pool import KVShape

_FLOAT32_BYTES = 4
_PRODUCTS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True)
class Machine:
    """Hold what was measured, of all threads. Operations: a multiplication and an addition are two."""

    bytes_per_s: float
    operations_per_s: float
    attention_operations_per_s: float

    @staticmethod
    def measure(numbers: str, attention: str, num_threads: int) -> Machine:
        """Measure it; `numbers` of the products with weights and of attention's, as `library.product_peak_gop_s` names them."""
        return Machine(
            library.read_bandwidth_gb_s(num_threads) * 1e9,
            library.product_peak_gop_s(numbers, num_threads) * 1e9,
            library.product_peak_gop_s(attention, num_threads) * 1e9,
        )

    def nanoseconds(self, num_bytes: float, operations: float = 0.0) -> int:
        """Return how long a product takes at least."""
        return round(1e9 * max(num_bytes / self.bytes_per_s, operations / self.operations_per_s))


@dataclass(frozen=True)
class Work:
    """Describe a step: `num_tokens` that are computed, `num_rows` of logits, `num_pairs` of a token and one that it attends to,
    `num_read` tokens whose KV is read. `experts_read`: for each layer with experts, in order, how many of them at least one token
    takes; several tokens take more than one does, and fewer than so many times as many."""

    num_tokens: int
    num_rows: int
    num_pairs: int
    num_read: int
    experts_read: tuple[float, ...] = ()

    @staticmethod
    def decode(num_seqs: int, context: int) -> Work:
        """Return that of sequences that each decode behind `context` tokens."""
        return Work(num_seqs, num_seqs, num_seqs * context, num_seqs * context)

    @staticmethod
    def prefill(num_tokens: int) -> Work:
        """Return that of a whole prompt in one step."""
        return Work(num_tokens, 1, num_tokens * (num_tokens + 1) // 2, num_tokens)


def limits_of(model: NativeModel, kv: KVShape, work: Work, machine: Machine) -> dict[str, int]:
    """Return the least nanoseconds of each part that has a limit. The others (norms, Python) read what caches hold.

    A sliding window bounds attention further than is counted here. Raises ValueError unless `work.experts_read` has a number for
    each layer with experts."""
    config, weights = model.config, model.weights
    products = {
        name: machine.nanoseconds(sum(each.bytes_read for each in uses), sum(each.operations for each in uses) * work.num_tokens)
        for name, uses in _uses(weights.layers, work.experts_read).items()
    }
    kv_bytes = kv.bytes_per_block / kv.block_size
    attention_s = max(
        work.num_read * kv_bytes / machine.bytes_per_s,
        work.num_pairs * config.attention_operations / machine.attention_operations_per_s,
    )
    head = weights.head
    return {
        "embed": machine.nanoseconds(work.num_tokens * config.hidden_size * weights.embedding.element_size()),
        **products,
        "attention": round(1e9 * attention_s),
        "head": machine.nanoseconds(head.num_bytes, 2.0 * _size(head) * work.num_rows),
        "sampling": machine.nanoseconds(_FLOAT32_BYTES * work.num_rows * config.vocab_size),
    }


def _size(linear: PackedLinear) -> int:
    return linear.num_outputs * linear.num_inputs


@dataclass(frozen=True)
class _Use:
    """Maps of one kind in a step: how many of them are read, and with how many a token is multiplied."""

    linear: PackedLinear
    num_read: float = 1.0
    num_multiplied: int = 1

    @property
    def bytes_read(self) -> float:
        return self.linear.num_bytes * self.num_read

    @property
    def operations(self) -> float:
        """Return those of one token."""
        return 2.0 * _size(self.linear) * self.num_multiplied


def _uses(layers: Sequence[PackedLayer], experts_read: Sequence[float]) -> Mapping[str, list[_Use]]:
    """Return the maps that tokens are multiplied with, by the part of a step that does it."""
    num_routed = sum(isinstance(layer.mlp, PackedExperts) for layer in layers)
    if len(experts_read) != num_routed:
        raise ValueError(f"experts_read: {len(experts_read)} numbers for {num_routed} layers with experts")
    found: dict[str, list[_Use]] = {name: [] for name in _PRODUCTS}
    counts = iter(experts_read)
    for layer in layers:
        found["qkv"].append(_Use(layer.qkv))
        found["output"].append(_Use(layer.output))
        mlps = [(layer.mlp, 1.0, 1)] if isinstance(layer.mlp, PackedMLP) else _taken(layer.mlp, next(counts))
        for mlp, num_read, num_multiplied in mlps:
            found["gate_up"].append(_Use(mlp.gate_up, num_read, num_multiplied))
            found["down"].append(_Use(mlp.down, num_read, num_multiplied))
    return found


def _taken(mlp: PackedExperts, num_read: float) -> list[tuple[PackedMLP, float, int]]:
    """All experts of a layer have one size."""
    shared = [] if mlp.shared is None else [(mlp.shared, 1.0, 1)]
    return [(mlp.experts[0], num_read, mlp.config.top_k), *shared]
