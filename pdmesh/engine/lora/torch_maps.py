"""Adapters on the torch backend: a map around each linear map of the layers, which adds what the loaded adapters add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdmesh.engine.lora.adapter import Adapter, AdapterMap, Site
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderLayer, DecoderModel
from pdmesh.engine.models.layers import GatedMLP, Linear, PlainMLP, make_linear, pad_rows
from pdmesh.engine.runner.batch import StepBatch


@dataclass(frozen=True)
class RowGroup:
    """Hold the rows of a step that have the adapter in `slot`."""

    slot: int
    rows: Tensor | None  # [count] int64; None: all rows
    padded: Tensor | None  # the same, with row 0 behind them up to a multiple of 4


class StepRows:
    """Hold the rows of the step that runs, by adapter; no groups where no row has one."""

    def __init__(self) -> None:
        self.groups: list[RowGroup] = []

    def begin(self, batch: StepBatch, device: torch.device) -> None:
        """Take over the batch's slots: every forward pass begins with this."""
        present = sorted({slot for slot in batch.adapter_slots if slot >= 0})
        if not present:
            self.groups = []
        elif len(set(batch.adapter_slots)) == 1:
            self.groups = [RowGroup(present[0], None, None)]
        else:
            slots = torch.tensor(batch.adapter_slots).repeat_interleave(torch.tensor(batch.query_starts).diff())
            self.groups = [_group(slot, torch.where(slots == slot)[0], device) for slot in present]


def _group(slot: int, rows: Tensor, device: torch.device) -> RowGroup:
    return RowGroup(slot, rows.to(device), pad_rows(rows).to(device))


@dataclass(frozen=True)
class Part:
    """Say which rows of a product are one map of the checkpoint's."""

    site: Site
    first: int
    count: int


@dataclass(frozen=True)
class _Thin:
    """Hold an adapter's two products beside one of the model's: [in] -> [ranks of all parts] -> [out]."""

    down: Linear
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.down(x.float()))


class AdaptedLinear:
    """Compute base(x) + B A x of each row's own adapter: [M, in] -> [M, out]."""

    def __init__(self, base: Linear, parts: Sequence[Part], outputs: int, rows: StepRows) -> None:
        self.base, self.kind = base, base.kind
        self._parts, self._outputs, self._rows = parts, outputs, rows
        self._thin: dict[int, _Thin] = {}

    def __call__(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for group in self._rows.groups:
            thin = self._thin.get(group.slot)
            if thin is not None:
                result = _added(result, group, thin, x)
        return result

    def put(self, slot: int, adapter: Adapter, device: torch.device) -> None:
        """Take the adapter's maps at these parts, if it has any."""
        pieces = [(part, found) for part in self._parts if (found := adapter.maps.get(part.site)) is not None]
        if pieces:
            self._thin[slot] = self._packed(pieces, device)

    def drop(self, slot: int) -> None:
        """Compute a slot no longer."""
        self._thin.pop(slot, None)

    def _packed(self, pieces: Sequence[tuple[Part, AdapterMap]], device: torch.device) -> _Thin:
        down = torch.cat([found.a for _, found in pieces])
        up = torch.zeros(self._outputs, len(down))
        column = 0
        for part, found in pieces:
            up[part.first : part.first + part.count, column : column + found.rank] = found.b
            column += found.rank
        return _Thin(make_linear(down.to(device)), make_linear(up.to(device)))


def _added(result: Tensor, group: RowGroup, thin: _Thin, x: Tensor) -> Tensor:
    """Return the result [M, out], changed in place where it can be, with what the adapter adds to its rows."""
    if group.rows is None or group.padded is None:
        return thin(x).add_(result).to(result.dtype)
    added = thin(x.index_select(0, group.padded))[: len(group.rows)]
    if result.dtype == torch.float32:
        return result.index_add_(0, group.rows, added)
    return result.index_copy_(0, group.rows, added.add_(result.index_select(0, group.rows)).to(result.dtype))


class TorchAdapters:
    """Put adapters into a decoder and take them out. Its maps are wrapped once; on the engine's thread, between steps."""

    def __init__(self, model: DecoderModel) -> None:
        self._device = model.device
        self._rows = StepRows()
        self._maps: list[AdaptedLinear] = []
        model.layers = [self._wrapped(index, layer, model.config) for index, layer in enumerate(model.layers)]
        model.adapter_rows = self._rows

    def put(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a free slot."""
        for each in self._maps:
            each.put(slot, adapter, self._device)

    def drop(self, slot: int) -> None:
        """Free a slot that no sequence uses."""
        for each in self._maps:
            each.drop(slot)

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
