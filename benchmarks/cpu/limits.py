"""What the machine allows at most for a model of some size: bytes over bandwidth, products over their peak."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdmesh.engine.kernels.cpu import library

READ, INT8, BF16 = "read bandwidth, all threads", "int8 product peak", "bf16 product peak"
INT4, KV = "int4 product peak", "int8 KV product peak"
# How each limit is measured; in turn with the contestants, so that a machine's moods touch all alike.
LIMIT_CASES: Mapping[str, Callable[[], float]] = {
    READ: library.read_bandwidth_gb_s,
    INT8: library.int8_peak_gop_s,
    INT4: library.int4_peak_gop_s,
    BF16: library.bf16_peak_gflop_s,
    KV: library.kv_peak_gop_s,
}
UNITS = {READ: "GB/s", INT8: "GOP/s", INT4: "GOP/s", BF16: "GFLOP/s", KV: "GOP/s"}
_KV_BYTES_PER_NUMBER = 2


@dataclass(frozen=True)
class ModelSizes:
    """Numbers that a step has to read or multiply. `expert_weights`: of all experts of all layers, beside `layer_weights`."""

    layer_weights: int
    head_weights: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    expert_weights: int = 0
    active_share: float = 1.0  # of its experts a token takes

    @staticmethod
    def read(folder: Path) -> ModelSizes:
        """Read config.json and the heads of the safetensors files."""
        config = json.loads((folder / "config.json").read_text())
        shapes: dict[str, list[int]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            shapes |= _shapes(file)
        layers = {name: math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2}
        experts = sum(count for name, count in layers.items() if ".experts." in name)
        heads = config["num_attention_heads"]
        return ModelSizes(
            layer_weights=sum(layers.values()) - experts,
            head_weights=config["vocab_size"] * config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            expert_weights=experts,
            active_share=config["num_experts_per_tok"] / config["num_experts"] if experts else 1.0,
        )

    @property
    def num_weights(self) -> int:
        """Return all that a decode step of one token reads: the layers' matrices, the experts that it takes, and the head (tied
        to the embedding or not)."""
        return self.layer_weights + self.head_weights + round(self.expert_weights * self.active_share)

    def weights_read(self, batch: int) -> float:
        """Return what a step of `batch` tokens reads; tokens take experts independently of each other."""
        taken = 1.0 - (1.0 - self.active_share) ** batch
        return self.layer_weights + self.head_weights + self.expert_weights * taken

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the KV of a token in 16 bits."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _KV_BYTES_PER_NUMBER

    def prefill_weight_operations(self, length: int) -> float:
        """Return a prompt's products with weights; the head is needed for the last token alone."""
        return 2.0 * ((self.num_weights - self.head_weights) * length + self.head_weights)

    def prefill_attention_operations(self, length: int) -> float:
        """Return those of scores and weighted values, the causal half."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * length * (length + 1) / 2


@dataclass(frozen=True)
class MachineLimits:
    """Medians of the run. `operations_s` by kind."""

    bytes_s: float
    int8_operations_s: float
    bf16_operations_s: float
    int4_operations_s: float | None = None  # of integers alone; None: as int8
    kv_operations_s: float | None = None  # of attention with int8 keys and values; None: as bf16

    @staticmethod
    def of(medians: Mapping[str, float]) -> MachineLimits | None:
        """Return them; None where the machine could not be measured, since there is no compiler for the kernels."""
        if not {READ, INT8, BF16} <= medians.keys():
            return None
        int4, kv = medians.get(INT4, medians[INT8]), medians.get(KV, medians[BF16])
        return MachineLimits(medians[READ] * 1e9, medians[INT8] * 1e9, medians[BF16] * 1e9, int4 * 1e9, kv * 1e9)

    def peak(self, bytes_per_weight: float) -> float:
        """Return the peak for weights so wide."""
        if bytes_per_weight < 1 and self.int4_operations_s is not None:
            return self.int4_operations_s
        return self.int8_operations_s if bytes_per_weight < 2 else self.bf16_operations_s

    def decode_speed(
        self, sizes: ModelSizes, bytes_per_weight: float, batch: int, context: float, kv_bytes_per_token: float | None = None
    ) -> float:
        """Return tokens a second at most: a step reads its weights once and each sequence's KV; products take their time, too.
        `kv_bytes_per_token`: None: in 16 bits."""
        kv_bytes = sizes.kv_bytes_per_token if kv_bytes_per_token is None else kv_bytes_per_token
        num_bytes = sizes.weights_read(batch) * bytes_per_weight + batch * context * kv_bytes
        compute_s = 2 * sizes.num_weights * batch / self.peak(bytes_per_weight)
        return batch / max(num_bytes / self.bytes_s, compute_s)

    def prefill_speed(self, sizes: ModelSizes, bytes_per_weight: float, length: int) -> float:
        """Return tokens a second at most: weights' products at their peak, attention's at that of int8 KV beside weights that are
        quantized, else at that of bf16."""
        seconds = sizes.prefill_weight_operations(length) / self.peak(bytes_per_weight)
        attention = self.kv_operations_s if bytes_per_weight < 2 and self.kv_operations_s is not None else self.bf16_operations_s
        return length / (seconds + sizes.prefill_attention_operations(length) / attention)


def _shapes(file: Path) -> dict[str, list[int]]:
    """The head of a safetensors file: its length in 8 bytes, then JSON."""
    with file.open("rb") as stream:
        head = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: entry["shape"] for name, entry in head.items() if name != "__metadata__"}
