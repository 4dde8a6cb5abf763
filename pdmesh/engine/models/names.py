"""Where a family's checkpoints store each tensor of a decoder.

Loaders ask by one vocabulary, the names of transformers' Llama, with those that a Llama does not have:

    model.embed_positions                 the table of learned positions      model.embed_norm      what the first layer reads
    model.layers.N.post_self_attn_norm    behind attention      model.layers.N.post_mlp_norm    behind the MLP
    model.layers.N.self_attn.sinks        a logit for each head
    model.layers.N.self_attn.{q_a_proj, q_a_norm, q_b_proj, kv_a_proj, kv_a_norm, kv_b_proj}    of latent attention
    model.layers.N.mlp.router             scores of experts, with `.weight`, `.bias` and `.correction`
    model.layers.N.mlp.experts.E.{gate,up,down}_proj       mlp.shared_expert.{gate,up,down}_proj       mlp.shared_gate

A family says only where its own names differ, and what is done to a stored tensor so that the engine's computation is the
checkpoint's: rows taken out of a fused matrix, a transposition, pairs of a rotated head put into the engine's order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pdmesh.engine.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[["Tensor", "Place"], "Tensor"]
"""Make the tensor that was asked for of the stored one."""


@dataclass(frozen=True)
class Place:
    """Say which tensor was asked for: its kind (weight, bias or another) and the expert's number, for one of an expert."""

    config: ModelConfig
    kind: str
    expert: int = -1


@dataclass(frozen=True)
class Stored:
    """Name a stored tensor. `stem`: without `.weight` or `.bias`; the expert's number stands at {}. Empty: it is not stored, and
    `change` gets an empty tensor. `kinds`: other endings than the canonical ones, such as {"weight": ""}. `count`: it is stored
    as so many tensors, whose number stands at {}; `change` gets them stacked."""

    stem: str
    change: tuple[Change, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    count: Callable[[ModelConfig], int] | None = None


@dataclass(frozen=True)
class Take:
    """Say where one tensor lies, and how it comes out of it. `linear_change`: the same for a weight that is always [out, in],
    as formats of quantized weights are, whatever the family's plain ones. `expert`: the number of the one that it is for. `rows`:
    names of tensors of which it is stacked, instead of `name`."""

    name: str
    change: tuple[Callable[[Tensor], Tensor], ...] = ()
    linear_change: tuple[Callable[[Tensor], Tensor], ...] = ()
    expert: int = -1
    rows: tuple[str, ...] = ()

    def read(self, stored: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor; `stored` gives one by its stored name."""
        import torch  # configs are read where there is none

        tensor = stored(self.name) if self.name else torch.empty(0)
        tensor = torch.stack([stored(name) for name in self.rows]) if self.rows else tensor
        for change in self.change:
            tensor = change(tensor)
        return tensor


@dataclass(frozen=True)
class Names:
    """Map canonical stems (those of a layer without `model.layers.N.`), or a stem with its kind, to stored ones; what is missing
    has its canonical name.

    `ignored`: a pattern of stored names that no computation needs."""

    stems: Mapping[str, str | Stored] = field(default_factory=dict)
    layers: str = "model.layers.{}"
    ignored: str = r".*\.rotary_emb\.inv_freq"
    prefix: str = ""  # of every stored name

    def find(self, name: str, config: ModelConfig) -> Take:
        """Return where the tensor with this canonical name lies."""
        layer, expert, stem, kind = _parse(name)
        stored = self.stems.get(f"{stem}.{kind}") or self.stems.get(stem, stem)
        stored = Stored(stored) if isinstance(stored, str) else stored
        ending = stored.kinds.get(kind, kind)
        place = Place(config, kind, expert)
        change = tuple(partial(_applied, step, place) for step in stored.change)
        linear = tuple(partial(_applied, step, place) for step in stored.change if step is not transposed)
        if not stored.stem:
            return Take("", change)
        path = stored.stem.format(expert) if expert >= 0 else stored.stem
        path = path if layer < 0 else f"{self.layers.format(layer)}.{path}"
        path = self.prefix + (f"{path}.{ending}" if ending else path)
        if stored.count is not None:
            return Take("", change, rows=tuple(path.format(number) for number in range(stored.count(config))))
        return Take(path, change, linear, expert)

    def find_rows(self, name: str, config: ModelConfig) -> Take:
        """As `find`, for a matrix with a row for each output of the map, which is never stored transposed: B of an adapter."""
        take = self.find(name, config)
        return Take(take.name, tuple(step for step in take.change if getattr(step, "args", ())[:1] != (transposed,)))


def _applied(change: Change, place: Place, tensor: Tensor) -> Tensor:
    return change(tensor, place)


def _parse(name: str) -> tuple[int, int, str, str]:
    """Return layer and expert (-1: none), the stem with {} for the expert's number, and the kind."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias", "correction"):
        stem, kind = name, ""
    layer, expert = -1, -1
    if found := re.match(r"model\.layers\.(\d+)\.", stem):
        layer, stem = int(found[1]), stem[found.end() :]
    if found := re.search(r"\.experts\.(\d+)\.", stem):
        expert, stem = int(found[1]), f"{stem[: found.start()]}.experts.{{}}.{stem[found.end() :]}"
    return layer, expert, stem, kind


# Changes


def rows(first: Callable[[ModelConfig], int], count: Callable[[ModelConfig], int]) -> Change:
    """Return a change that takes `count` rows from the row `first` on."""
    return lambda tensor, place: tensor[first(place.config) : first(place.config) + count(place.config)]


def transposed(tensor: Tensor, place: Place) -> Tensor:
    """Transpose a weight that is stored [in, out]; biases pass."""
    return tensor.t().contiguous() if place.kind == "weight" else tensor


def plus_one(tensor: Tensor, place: Place) -> Tensor:
    """Return the factor of a norm that stores its distance from 1."""
    return tensor.float() + 1.0 if place.kind == "weight" else tensor


def ones(tensor: Tensor, place: Place) -> Tensor:
    """Return the weight of a norm that has none."""
    import torch  # configs are read where there is none

    return torch.ones(place.config.hidden_size)


def head_ones(tensor: Tensor, place: Place) -> Tensor:
    """Return the weight of a norm of heads that has none."""
    import torch

    return torch.ones(place.config.head_dim)


def columns(width: Callable[[ModelConfig], int]) -> Change:
    """Return a change that reads a flat weight as one of so many columns."""
    return lambda tensor, place: tensor.reshape(-1, width(place.config))


def halves_from_pairs(tensor: Tensor, place: Place) -> Tensor:
    """Reorder the rows of query or key heads whose neighbours are rotated together, so that halves are: row 2i goes to i, row
    2i + 1 to i + rotary_dim / 2. Scores are the same, since queries and keys are reordered alike."""
    config = place.config
    order = pair_order(config.head_dim, config.rope.rotary_dim).to(tensor.device)
    heads = tensor.reshape(-1, config.head_dim, *tensor.shape[1:])
    return heads[:, order].reshape(tensor.shape)


def pair_order(width: int, rotary_dim: int) -> Tensor:
    """Return for each of `width` dimensions of a head which stored one stands there."""
    import torch

    pairs = torch.arange(rotary_dim).view(-1, 2).t().flatten()
    return torch.cat((pairs, torch.arange(rotary_dim, width)))


def query_rows(config: ModelConfig) -> int:
    """Return the rows of the query map."""
    return config.num_heads * config.head_dim


def kv_rows(config: ModelConfig) -> int:
    """Return the rows of the key map, and of the value map."""
    return config.num_kv_heads * config.head_dim


def none(config: ModelConfig) -> int:
    """Return 0: the first row."""
    return 0


def fused_qkv(stem: str, *more: Change) -> dict[str, Stored]:
    """Return stems of queries, keys and values that are stored one after the other as one map; `more` comes first."""
    return {
        "self_attn.q_proj": Stored(stem, (*more, rows(none, query_rows))),
        "self_attn.k_proj": Stored(stem, (*more, rows(query_rows, kv_rows))),
        "self_attn.v_proj": Stored(stem, (*more, rows(lambda c: query_rows(c) + kv_rows(c), kv_rows))),
    }


def grouped_qkv(stem: str) -> dict[str, Stored]:
    """Return stems of queries, keys and values that are stored group by group: a key/value head's queries, its key, its value."""

    def part(first: Callable[[ModelConfig], int], count: Callable[[ModelConfig], int]) -> Change:
        def change(tensor: Tensor, place: Place) -> Tensor:
            config = place.config
            groups = tensor.reshape(config.num_kv_heads, config.num_groups + 2, config.head_dim, *tensor.shape[1:])
            return groups[:, first(config) : first(config) + count(config)].reshape(-1, *tensor.shape[1:])

        return change

    return {
        "self_attn.q_proj": Stored(stem, (part(none, lambda c: c.num_groups),)),
        "self_attn.k_proj": Stored(stem, (part(lambda c: c.num_groups, lambda c: 1),)),
        "self_attn.v_proj": Stored(stem, (part(lambda c: c.num_groups + 1, lambda c: 1),)),
    }


def fused_gate_up(stem: str) -> dict[str, Stored]:
    """Return stems of gate and up that are stored one after the other as one map."""
    return {
        "mlp.gate_proj": Stored(stem, (rows(none, _inner),)),
        "mlp.up_proj": Stored(stem, (rows(_inner, _inner),)),
    }


def _inner(config: ModelConfig) -> int:
    return config.intermediate_size


def joined(*tables: Mapping[str, str | Stored]) -> dict[str, str | Stored]:
    """Return all stems of several tables."""
    return {stem: stored for table in tables for stem, stored in table.items()}


def changed(change: Change, stems: Sequence[str], names: Mapping[str, str] | None = None) -> dict[str, Stored]:
    """Return stems that all get one change; `names` are their stored stems where those differ."""
    return {stem: Stored((names or {}).get(stem, stem), (change,)) for stem in stems}
