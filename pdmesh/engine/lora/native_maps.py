"""Adapters on the native CPU backend: A and B of each product, packed for the kernels.

A product of the kernels may be several maps of the checkpoint's: query, key and value one after the other, gate and up in
alternating panels of 16 outputs. Such a product has one A, whose rows are those of all maps that the adapter changes; each map
has a B of its own, which reads its part of A x and adds to its panels (pdmesh/engine/kernels/cpu/adapters.h).

    x ──A──► h [rank of q | rank of v] ──B of q──► panels 0, 1, ... of the product
                                       ──B of v──► panels behind those of q and k
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pdmesh.engine.config import MAX_LORAS
from pdmesh.engine.kernels.cpu import library as abi
from pdmesh.engine.kernels.cpu.model import NativeModel, PackedLinear, gathered
from pdmesh.engine.loader.pack import PANEL, one_torch_thread, pack_float32, pad_to_panels
from pdmesh.engine.lora.adapter import Adapter, AdapterMap, Site
from pdmesh.engine.models.config import ModelConfig


@dataclass(frozen=True)
class _Place:
    """Say which panels of a product are one map's: first, first + step, and so on."""

    stem: str
    first: int = 0
    step: int = 1


def _places(config: ModelConfig) -> dict[str, tuple[_Place, ...]]:
    """Return the maps of each product, in the order of the kernels."""
    query, kv = config.num_heads * config.head_dim // PANEL, config.num_kv_heads * config.head_dim // PANEL
    first_maps = (_Place("mlp.gate_proj", 0, 2), _Place("mlp.up_proj", 1, 2)) if config.gated_mlp else (_Place("mlp.up_proj"),)
    places = {
        "qkv": (_Place("self_attn.q_proj"), _Place("self_attn.k_proj", query), _Place("self_attn.v_proj", query + kv)),
        "output": (_Place("self_attn.o_proj"),),
        "gate_up": first_maps,
        "down": (_Place("mlp.down_proj"),),
    }
    return {product: places[product] for product in abi.ADAPTED_PRODUCTS}


@dataclass(frozen=True)
class _Part:
    place: _Place
    up: PackedLinear
    column: int  # where its numbers begin in A x

    def descriptor(self) -> abi.AdapterPart:
        return abi.AdapterPart(self.up.descriptor(), self.column, self.place.first, self.place.step)


@dataclass(frozen=True)
class _Product:
    """Hold what an adapter adds to one product; `down` is A."""

    down: PackedLinear
    parts: tuple[_Part, ...]

    @property
    def linears(self) -> list[PackedLinear]:
        return [self.down, *(part.up for part in self.parts)]

    def with_linears(self, linears: Iterator[PackedLinear]) -> _Product:
        """Return the same with other maps, taken in the order of `linears`."""
        return _Product(next(linears), tuple(_Part(part.place, next(linears), part.column) for part in self.parts))

    def descriptor(self) -> abi.AdapterMap:
        parts = (abi.AdapterPart * len(self.parts))(*(part.descriptor() for part in self.parts))
        return abi.AdapterMap(self.down.descriptor(), parts, len(self.parts))


class NativeAdapters:
    """Put adapters into a native model and take them out, on the engine's thread, between steps."""

    def __init__(self, model: NativeModel) -> None:
        """A and B are held in the dtype of what the model does not quantize."""
        self._config = model.config
        self._form = "float32" if model.weights.embedding.dtype == torch.float32 else "wide bfloat16"
        self._table = model.adapters = abi.AdapterTable(MAX_LORAS)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a free slot."""
        with one_torch_thread():
            products = _in_one_piece(self._packed(adapter.maps))
        maps = [abi.AdapterMap() if product is None else product.descriptor() for product in products]
        self._table.put(slot, maps, products)

    def drop(self, slot: int) -> None:
        """Free a slot that no sequence uses."""
        self._table.drop(slot)

    def _packed(self, maps: Mapping[Site, AdapterMap]) -> list[_Product | None]:
        """Return all products of all layers, in the order in which a step reads them; None: the adapter adds nothing."""
        places, layers = _places(self._config).values(), range(self._config.num_layers)
        return [_product(layer, each, maps, self._form) for layer in layers for each in places]


def _product(layer: int, places: Sequence[_Place], maps: Mapping[Site, AdapterMap], form: str) -> _Product | None:
    found = [(place, maps[site]) for place in places if (site := Site(layer, place.stem)) in maps]
    if not found:
        return None
    downs = {id(each.a): each.a for _, each in found}  # maps that the checkpoint stores as one have the same A
    starts = dict(zip(downs, accumulate(map(len, downs.values()), initial=0), strict=False))
    parts = (_Part(place, _linear(each.b, form), starts[id(each.a)]) for place, each in found)
    return _Product(_linear(torch.cat(list(downs.values())), form), tuple(parts))


def _linear(weight: Tensor, form: str) -> PackedLinear:
    packed = pack_float32(weight) if form == "float32" else _pack_wide(weight)
    return PackedLinear(form, weight.shape[0], weight.shape[1], 0, packed)


def _pack_wide(weight: Tensor) -> Tensor:
    """Pack weight [N, K] as [N/16][K][16] bfloat16 -> N' * K * 2 bytes."""
    panels = pad_to_panels(weight.bfloat16()).view(-1, PANEL, weight.shape[1])
    return panels.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def _in_one_piece(products: Sequence[_Product | None]) -> list[_Product | None]:
    """Return copies in large pages, one after the other."""
    linears = [linear for product in products if product is not None for linear in product.linears]
    copies = iter(gathered(linears) if linears else [])
    return [None if product is None else product.with_linears(copies) for product in products]
