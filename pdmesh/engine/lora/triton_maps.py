"""Adapters on the Triton kernels: places of a fixed size around each linear map of the layers, which steps read on the device.

    a map of query, key and value      A [places, 3, room, in]      B [places, out, room]      room: --max-lora-rank

All is allocated when the model is loaded, before the KV pool is sized, and filled in place: loading and unloading moves nothing
that a graph was recorded over. A and B have the model's dtype, which halves the memory of a model in 16 bits, and with it what a
step reads; the rounding is of an adapter's share in a product alone, and no more than its base's weights have had. In a float32
model they are PEFT's own numbers. Memory: places * room * (parts * in + out) numbers of each map; for 8B in bfloat16 some 5 MB a
rank, 2.7 GB for 8 places of 64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdmesh.engine.errors import AdapterRefused
from pdmesh.engine.kernels.triton.lora import RANK_MULTIPLE, AdapterRows, AdapterWeights
from pdmesh.engine.lora.adapter import Adapter, sites_of
from pdmesh.engine.lora.torch_maps import Part, with_maps
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.models.layers import Linear


class TritonAdaptedLinear:
    """Compute inner(x) + B A x of each row's own adapter: [M, in] -> [M, out]."""

    def __init__(self, inner: Linear, parts: Sequence[Part], weights: AdapterWeights, rows: AdapterRows) -> None:
        self.inner, self.kind = inner, inner.kind
        self.parts, self.weights, self._rows = parts, weights, rows

    def __call__(self, x: Tensor) -> Tensor:
        result = self.inner(x)
        if (groups := self._rows.current) is not None:
            self.weights.add(x, result, groups)
        return result

    def put(self, slot: int, adapter: Adapter) -> None:
        """Take the adapter's maps at these parts."""
        found = [adapter.maps.get(part.site) for part in self.parts]
        self.weights.put(slot, [None if each is None else (each.a, each.b) for each in found])


class TritonAdapters:
    """Put adapters into a decoder and take them out. Its maps are wrapped once, before a step is made of it; on the engine's
    thread, between steps."""

    def __init__(self, decoder: DecoderModel, num_places: int, max_rank: int) -> None:
        """`max_rank`: the largest rank of an adapter, for which memory is taken."""
        self.rows = AdapterRows(num_places, decoder.device)
        self._max_rank, self._num_places, self._like = max_rank, num_places, decoder.embedding
        self._maps: list[TritonAdaptedLinear] = []
        self._shapes = sites_of(decoder.config)
        decoder.layers[:] = [with_maps(index, layer, decoder.config, self._around) for index, layer in enumerate(decoder.layers)]

    @property
    def num_bytes(self) -> int:
        return sum(each.weights.num_bytes for each in self._maps)

    @property
    def num_columns(self) -> int:
        """Return the most float32 numbers that a token has between A and B."""
        return max((each.weights.num_columns for each in self._maps), default=0)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a free place. Raises AdapterRefused, and changes nothing, for one that has no room, or whose
        numbers the model's dtype cannot hold."""
        self._check(adapter)
        for each in self._maps:
            each.put(slot, adapter)

    def drop(self, slot: int) -> None:
        """Free a place that no sequence uses."""
        for each in self._maps:
            each.weights.drop(slot)

    def _check(self, adapter: Adapter) -> None:
        name = f"adapter {adapter.id.name!r}"
        if adapter.rank > self._max_rank:
            raise AdapterRefused(
                f"{name}: rank {adapter.rank}, and this worker has room for {self._max_rank}; start it with "
                f"--max-lora-rank {adapter.rank}"
            )
        largest = torch.finfo(self._like.dtype).max
        for site, each in adapter.maps.items():
            if max(float(each.a.abs().max()), float(each.b.abs().max())) > largest:
                raise AdapterRefused(
                    f"{name}: layer {site.layer}, {site.stem}: numbers beyond {self._like.dtype}'s {largest:g}; give --dtype "
                    "bfloat16"
                )

    def _around(self, inner: Linear, parts: Sequence[Part]) -> TritonAdaptedLinear:
        room = self._max_rank + -self._max_rank % RANK_MULTIPLE
        _, inputs = self._shapes[parts[0].site]
        weights = AdapterWeights(self._num_places, room, inputs, [part.count for part in parts], self._like)
        self._maps.append(TritonAdaptedLinear(inner, parts, weights, self.rows))
        return self._maps[-1]
