"""Adapters on the torch backend: a map around each linear map of the layers, which adds what the loaded adapters add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdmesh.engine.lora.adapter import Adapter, AdapterMap, Site
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderLayer, DecoderModel
from pdmesh.engine.models.layers import ROW_MULTIPLE, GatedMLP, Linear, PlainMLP, make_linear
from pdmesh.engine.runner.batch import StepBatch


class StepRows:
    """Hold the slot of each row of the step that runs; `slots` is None where no row has an adapter."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None  # [T padded, 1] int64, -1: no adapter
        self._foreign: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def begin(self, batch: StepBatch, device: torch.device) -> None:
        """Take over the batch's slots: every forward pass begins with this."""
        self._foreign.clear()
        if not any(slot >= 0 for slot in batch.adapter_slots):
            self.slots = None
            return
        counts = torch.tensor(batch.query_starts).diff()
        slots = torch.tensor(batch.adapter_slots).repeat_interleave(counts)
        padding = torch.full((-len(slots) % ROW_MULTIPLE,), -1)
        self.slots = torch.cat((slots, padding)).unsqueeze(1).to(device)

    def foreign(self, layout: tuple[tuple[int, int], ...], owners: Tensor) -> Tensor:
        """Return a mask [T padded, sum of ranks] of the columns that are not the row's own. `owners` has each column's slot;
        `layout` names it, so that maps with equal ranks share one mask."""
        assert self.slots is not None
        mask = self._foreign.get(layout)
        if mask is None:
            mask = self._foreign[layout] = self.slots != owners
        return mask


@dataclass(frozen=True)
class Part:
    """Say which rows of a product are one map of the checkpoint's."""

    site: Site
    first: int
    count: int


@dataclass(frozen=True)
class _Joined:
    """Hold the matrices of all adapters of one product: [in] -> [ranks] -> [out]."""

    layout: tuple[tuple[int, int], ...]  # (slot, its columns)
    owners: Tensor
    down: Linear
    up: Linear


class AdaptedLinear:
    """Compute base(x) + B A x of each row's own adapter: [M, in] -> [M, out]."""

    def __init__(self, base: Linear, parts: Sequence[Part], outputs: int, rows: StepRows) -> None:
        self.base, self.kind = base, base.kind
        self._parts, self._outputs, self._rows = parts, outputs, rows
        self._joined: _Joined | None = None

    def __call__(self, x: Tensor) -> Tensor:
        result = self.base(x)
        joined = self._joined
        if joined is None or self._rows.slots is None:
            return result
        own = joined.down(x.float()).masked_fill_(self._rows.foreign(joined.layout, joined.owners), 0.0)
        added = joined.up(own)
        return added.add_(result) if result.dtype == torch.float32 else added.add_(result).to(result.dtype)

    def join(self, adapters: Mapping[int, Adapter], device: torch.device) -> None:
        """Take the maps of all loaded adapters, by slot."""
        pieces = [
            (slot, part, found)
            for slot, adapter in sorted(adapters.items())
            for part in self._parts
            if (found := adapter.maps.get(part.site)) is not None
        ]
        self._joined = self._of(pieces, device) if pieces else None

    def _of(self, pieces: Sequence[tuple[int, Part, AdapterMap]], device: torch.device) -> _Joined:
        down = torch.cat([found.a for _, _, found in pieces])
        up = torch.zeros(self._outputs, len(down))
        column = 0
        for _, part, found in pieces:
            up[part.first : part.first + part.count, column : column + found.rank] = found.b
            column += found.rank
        layout = tuple((slot, found.rank) for slot, _, found in pieces)
        owners = torch.tensor([slot for slot, width in layout for _ in range(width)])
        return _Joined(layout, owners.to(device), make_linear(down.to(device)), make_linear(up.to(device)))


class TorchAdapters:
    """Put adapters into a decoder and take them out. Its maps are wrapped once; on the engine's thread, between steps."""

    def __init__(self, model: DecoderModel) -> None:
        self._device = model.device
        self._rows = StepRows()
        self._loaded: dict[int, Adapter] = {}
        self._maps: list[AdaptedLinear] = []
        model.layers = [self._wrapped(index, layer, model.config) for index, layer in enumerate(model.layers)]
        model.adapter_rows = self._rows

    def put(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a free slot."""
        self._loaded[slot] = adapter
        self._join()

    def drop(self, slot: int) -> None:
        """Free a slot that no sequence uses."""
        del self._loaded[slot]
        self._join()

    def _join(self) -> None:
        for each in self._maps:
            each.join(self._loaded, self._device)

    def _wrapped(self, index: int, layer: DecoderLayer, config: ModelConfig) -> DecoderLayer:
        mlp = layer.mlp
        inner, hidden = config.intermediate_size, config.hidden_size
        if isinstance(mlp, GatedMLP):
            mlp.gate_up = self._around(mlp.gate_up, index, {"mlp.gate_proj": inner, "mlp.up_proj": inner})
        elif isinstance(mlp, PlainMLP):
            mlp.up = self._around(mlp.up, index, {"mlp.up_proj": inner})
        if isinstance(mlp, (GatedMLP, PlainMLP)):
            mlp.down = self._around(mlp.down, index, {"mlp.down_proj": hidden})
        output = self._around(layer.output, index, {"self_attn.o_proj": hidden})
        if config.latent is not None:
            return replace(layer, output=output)
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        return replace(layer, qkv=self._around(layer.qkv, index, parts), output=output)

    def _around(self, base: Linear, layer: int, outputs: Mapping[str, int]) -> AdaptedLinear:
        parts, first = [], 0
        for stem, count in outputs.items():
            parts.append(Part(Site(layer, stem), first, count))
            first += count
        self._maps.append(AdaptedLinear(base, parts, first, self._rows))
        return self._maps[-1]
