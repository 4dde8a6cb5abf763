"""The part of a model's weights that a rank has: pure functions from names and shapes.

    rows of q, k, v (by heads), gate, up                 each rank has its own outputs: nothing is exchanged behind them
    columns of o, down                                   each rank has its own inputs: the outputs are sums over ranks
    rows of the output head (by vocabulary)              rank 0 gathers the logits
    norms, embeddings                                    every rank has all of them

(Shoeybi et al., Megatron-LM, 2019, section 3.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight
from pdmesh.engine.loader.safetensors import WeightSource
from pdmesh.engine.models.config import ModelConfig

QuantizedWeight = Int8Weight | Int4Weight | Fp8Weight
_BY_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_BY_COLUMNS = frozenset({"o_proj", "down_proj"})


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


def check_degree(degree: int, model: ModelConfig) -> None:
    """Raise ValueError, naming the field, unless `degree` ranks can share this model."""
    for what, count in (("KV heads", model.num_kv_heads), ("intermediate columns", model.intermediate_size)):
        if count % degree:
            heads, columns = model.num_kv_heads, model.intermediate_size
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if not (heads % n or columns % n))
            raise ValueError(f"tensor_parallel: {degree} does not divide the model's {count} {what}; give one of {fitting}")


def shard_config(model: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the model as this rank computes it. Its vocabulary is whole: embeddings are."""
    return replace(
        model,
        num_heads=len(shard.part(model.num_heads)),
        num_kv_heads=len(shard.part(model.num_kv_heads)),
        intermediate_size=len(shard.part(model.intermediate_size)),
    )


def num_elements_held(model: ModelConfig, num_elements: int, degree: int, *, one_memory: bool) -> int:
    """Return the weights in one memory: of all ranks, or of one. What every rank has is little beside the embeddings."""
    table = model.vocab_size * model.hidden_size
    return num_elements + (degree - 1) * table if one_memory else (num_elements - table) // degree + table


class ShardSource:
    """A checkpoint as one rank sees it: tensors are already cut, and `config` is for them. A WeightSource."""

    def __init__(self, source: WeightSource, shard: Shard) -> None:
        self.config = shard_config(source.config, shard)
        self._source, self._shard = source, shard

    def names(self) -> frozenset[str]:
        return self._source.names()

    def get(self, name: str) -> Tensor:
        return cut(name, self._source.get(name), self._shard)

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
    if map_name in _BY_ROWS:
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
