"""What a step takes before any was measured: operations over operations a second, bytes over bytes a second. Pure."""

from dataclasses import dataclass

from pdmesh.planning.latency_model import LatencyModel

# What real steps reach of measured limits: the kernels that were written for it do better, torch does worse.
COMPUTE_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.8
# What a step does besides: planning, sampling, a few launches or calls for each layer; and what each sequence's row adds to that.
OVERHEAD_S = 3e-4
OVERHEAD_PER_LAYER_S = 5e-6
OVERHEAD_PER_SEQUENCE_S = 3e-5
SUMS_PER_LAYER = 2  # over the ranks that share a model, where there are several


@dataclass(frozen=True)
class Hardware:
    """Measured limits of one worker, all its ranks together: operations (a multiplication and an addition are two) and bytes a
    second. `sum_s`: of adding up a few rows over ranks; 0: there is one rank."""

    operations_per_s: float
    bytes_per_s: float
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("operations_per_s", "bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not more than 0")
        if not self.sum_s >= 0:
            raise ValueError(f"sum_s: {self.sum_s} is less than 0")


@dataclass(frozen=True)
class ModelShape:
    """What a model costs. `attention_operations`: of one token for each token that it attends to."""

    num_layers: int
    num_weights: int  # that each token is multiplied with
    num_head_weights: int  # that each row of logits is multiplied with
    weight_bytes: int  # that each step reads
    kv_bytes_per_token: int
    attention_operations: int


def prior_of(hardware: Hardware, shape: ModelShape) -> LatencyModel:
    """A step reads all weights once and multiplies each token with them; a token that attends reads keys and values."""
    operations_s = hardware.operations_per_s * COMPUTE_EFFICIENCY
    bytes_s = hardware.bytes_per_s * MEMORY_EFFICIENCY
    token_s = 2 * shape.num_weights / operations_s
    layer_s = OVERHEAD_PER_LAYER_S + SUMS_PER_LAYER * hardware.sum_s
    return LatencyModel(
        fixed_s=shape.weight_bytes / bytes_s + OVERHEAD_S + layer_s * shape.num_layers,
        per_prefill_token_s=token_s,
        # The tokens of a chunk share what is read.
        per_prefill_context_s=shape.attention_operations / operations_s,
        per_sequence_s=token_s + 2 * shape.num_head_weights / operations_s + OVERHEAD_PER_SEQUENCE_S,
        per_context_token_s=shape.kv_bytes_per_token / bytes_s + shape.attention_operations / operations_s,
    )
