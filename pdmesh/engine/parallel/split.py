"""The part of a model's weights that a rank has: pure functions from names and shapes.

    rows of q, k, v (by heads), gate, up                 each rank has its own outputs: nothing is exchanged behind them
    columns of o, down                                   each rank has its own inputs: the outputs are sums over ranks
    experts                                              each is cut like an MLP, or (expert parallelism) each rank has some whole
    rows of q, q_b, kv_b of latent attention (by heads)  every rank has the latent
    sinks, norms with a weight for each head             of the rank's own heads; over all heads: squares are summed
    rows of the output head (by vocabulary)              rank 0 gathers the logits
    norms, embeddings, routers                           every rank has all of them

(Shoeybi et al., Megatron-LM, 2019, section 3; experts: Lepikhin et al., GShard, 2020.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight
from pdmesh.engine.loader.safetensors import WeightSource
from pdmesh.engine.models.config import ExpertsConfig, ModelConfig

QuantizedWeight = Int8Weight | Int4Weight | Fp8Weight
_BY_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"})
_BY_COLUMNS = frozenset({"o_proj", "down_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})


@dataclass(frozen=True)
class Shard:
    """Identify rank `rank` of `size`."""

    rank: int
    size: int

    def part(self, total: int) -> range:
        """Return its part of `total` things that `size` divides."""
        count = total // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def vocabulary(self, vocab_size: int) -> range:
        """Return its rows of the output head: as many on every rank, but fewer on the last ones where they are not a multiple."""
        count = self.vocabulary_rows(vocab_size)
        return range(min(self.rank * count, vocab_size), min((self.rank + 1) * count, vocab_size))

    def vocabulary_rows(self, vocab_size: int) -> int:
        """Return the rows of the head that every rank computes, the last ones' padding included."""
        return -(-vocab_size // self.size)


def check_degree(degree: int, model: ModelConfig, *, device: str = "cpu", expert_parallel: bool = False) -> None:
    """Raise ValueError, naming the field, unless `degree` ranks can share this model."""
    if expert_parallel and (model.experts is None or degree == 1):
        why = "the model has no experts" if model.experts is None else "one rank has them all, as tensor_parallel is 1"
        raise ValueError(f"expert_parallel: {why}; leave it out")
    counts = _shared_counts(model, expert_parallel=expert_parallel)
    for what, count in counts.items():
        if count % degree:
            fitting = [n for n in range(1, max(counts.values()) + 1) if not any(each % n for each in counts.values())]
            names = ", ".join(map(str, fitting))
            raise ValueError(f"tensor_parallel: {degree} does not divide the model's {count} {what}; give one of {names}")
    part = why_not_shared(model, device)
    if degree > 1 and part:
        raise ValueError(f"tensor_parallel: {part} cannot be computed by several ranks; give 1")


def why_not_shared(model: ModelConfig, device: str) -> str:
    """Return the part that ranks cannot share, or empty. A norm over all heads needs a sum over ranks before each attention,
    which the torch backend has on the CPU; on devices a rank's pool has the heads of that rank, and a latent has none."""
    if device != "cuda":
        return ""
    if model.qk_norm == "all":
        return "QK norm over all heads on CUDA"
    return "latent attention on CUDA" if model.latent is not None else ""


def _shared_counts(model: ModelConfig, *, expert_parallel: bool) -> dict[str, int]:
    """Return what ranks share equally."""
    counts = {"heads": model.num_heads} if model.latent else {"KV heads": model.num_kv_heads}
    experts = model.experts
    if experts is None or not all(experts.layers):
        counts["intermediate columns"] = model.intermediate_size
    if experts is not None and experts.shared_intermediate_size:
        counts["columns of the shared expert"] = experts.shared_intermediate_size
    if experts is not None:
        own = ("experts", experts.num_experts) if expert_parallel else ("columns of an expert", experts.intermediate_size)
        counts[own[0]] = own[1]
    return counts


def shard_config(model: ModelConfig, shard: Shard, *, expert_parallel: bool = False) -> ModelConfig:
    """Return the model as this rank computes it. Its vocabulary is whole: embeddings are; so are router and experts' numbers."""
    return replace(
        model,
        num_heads=len(shard.part(model.num_heads)),
        num_kv_heads=len(shard.part(model.num_kv_heads)),
        intermediate_size=len(shard.part(model.intermediate_size)),
        experts=model.experts and _shard_experts(model.experts, shard, expert_parallel=expert_parallel),
    )


def _shard_experts(experts: ExpertsConfig, shard: Shard, *, expert_parallel: bool) -> ExpertsConfig:
    inner = experts.intermediate_size
    return replace(
        experts,
        intermediate_size=inner if expert_parallel else len(shard.part(inner)),
        shared_intermediate_size=len(shard.part(experts.shared_intermediate_size)),
    )


def num_elements_held(model: ModelConfig, num_elements: int, degree: int, *, one_memory: bool) -> int:
    """Return the weights in one memory: of all ranks, or of one. What every rank has is little beside the embeddings."""
    table = model.vocab_size * model.hidden_size
    return num_elements + (degree - 1) * table if one_memory else (num_elements - table) // degree + table


class ShardSource:
    """A checkpoint as one rank sees it: tensors are already cut, and `config` is for them. A WeightSource.

    It is asked by canonical names (pdmesh/engine/models/names.py): what a family fuses or renames was undone before the cut."""

    def __init__(self, source: WeightSource, shard: Shard, *, expert_parallel: bool = False) -> None:
        self.config = shard_config(source.config, shard, expert_parallel=expert_parallel)
        self._source, self._shard, self._whole_experts = source, shard, expert_parallel

    def names(self) -> frozenset[str]:
        return self._source.names()

    def get(self, name: str) -> Tensor:
        tensor = self._source.get(name)
        if self.config.qk_norm == "all" and name.endswith(("q_norm.weight", "k_norm.weight")):
            rows = _part_of(name, len(tensor), self._shard)
            return tensor[rows.start : rows.stop]
        return tensor if self._whole_experts and ".experts." in name else cut(name, tensor, self._shard)

    def get_int4(self, name: str, group: int) -> Int4Weight | None:
        """Return None: shards are of floating numbers only."""
        return None

    def get_int8(self, name: str) -> Int8Weight | None:
        """Return None: shards are of floating numbers only."""
        return None

    def num_elements(self) -> int:
        return self._source.num_elements()


def cut(name: str, tensor: Tensor, shard: Shard) -> Tensor:
    """Return this rank's part of a tensor. The bias of a sum over ranks is added by rank 0 alone.

    Raises ValueError for a shape that cannot be shared.
    """
    _, map_name, kind = ("..." + name).rsplit(".", 2)
    has_heads = kind == "sinks" or (map_name in _HEAD_NORMS and tensor.dim() == 2)
    if map_name in _BY_ROWS or has_heads:
        rows = _part_of(name, tensor.shape[0], shard)
        return tensor[rows.start : rows.stop]
    if map_name not in _BY_COLUMNS:
        return tensor
    if kind == "bias":
        return tensor if shard.rank == 0 else tensor.new_zeros(tensor.shape)
    columns = _part_of(name, tensor.shape[1], shard)
    return tensor[:, columns.start : columns.stop].contiguous()


def cut_quantized(name: str, weight: QuantizedWeight, shard: Shard) -> QuantizedWeight:
    """Return this rank's part of a quantized tensor. Raises ValueError for a shape that cannot be shared, or groups that a cut
    would split."""
    values = cut(name, weight.values, shard)
    if isinstance(weight, Int4Weight):
        if values.shape[1] % weight.group:
            fits = f"{values.shape[1]} columns of a rank; give a smaller quantization_group, or another tensor_parallel"
            raise ValueError(f"{name}: groups of {weight.group} do not fit into {fits}")
        scales, minimums = (cut(name, each, shard) for each in (weight.scales, weight.minimums))
        return replace(weight, values=values, scales=scales, minimums=minimums)
    is_by_rows = len(values) < len(weight.values)
    return replace(weight, values=values, scales=cut(name, weight.scales, shard) if is_by_rows else weight.scales)


def whole_shape(name: str, rows: int, width: int, shard: Shard) -> tuple[int, int]:
    """Return the shape of the weight `name` of which a rank has [rows, width]."""
    _, map_name, _ = ("..." + name).rsplit(".", 2)
    return rows * (shard.size if map_name in _BY_ROWS else 1), width * (shard.size if map_name in _BY_COLUMNS else 1)


def _part_of(name: str, total: int, shard: Shard) -> range:
    if total % shard.size:
        raise ValueError(f"{name}: {total} cannot be shared by {shard.size} ranks; give another tensor_parallel")
    return shard.part(total)
