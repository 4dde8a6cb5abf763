"""Adapters on the torch backend: a map around each linear map of the layers, which adds what the loaded adapters add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.lora.adapter import Adapter, Site
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderLayer, DecoderModel
from pdmesh.engine.models.layers import ROW_MULTIPLE, GatedMLP, Linear, PlainMLP, make_linear, pad_rows
from pdmesh.engine.runner.batch import StepBatch

PAGE_COLUMNS = 128
"""Ranks that share a product. So few that the sum over them is not cut into blocks, which would make bits depend on the place of
an adapter among the others; more would also mean more products with the zeros of other rows' adapters."""


@dataclass(frozen=True)
class Part:
    """Say which rows of a product are one map of the checkpoint's."""

    site: Site
    first: int
    count: int


@dataclass(frozen=True)
class _Page:
    """Hold the matrices of some adapters for one product of the model: [in] -> [their ranks] -> [out]."""

    slots: frozenset[int]
    layout: tuple[tuple[int, int], ...]  # (slot, its columns), in order
    owners: Tensor  # [ranks]: the slot of each column
    down: Linear
    up: Linear

    def __call__(self, x: Tensor, foreign: Tensor) -> Tensor:
        """Return what is added to rows [m, in]; `foreign` [m, ranks]: the columns that are not the row's own."""
        return self.up(self.down(x.float()).masked_fill_(foreign, 0.0))


class _Rows(NamedTuple):
    """Rows of a step that a page is computed for: all, or those of its adapters where they are few."""

    rows: Tensor | None  # [count] int64; None: all
    padded: Tensor | None  # the same, with row 0 behind them up to a multiple of 4
    foreign: Tensor


class StepRows:
    """Hold the slot of each row of the step that runs; `present`: the slots that some row has."""

    def __init__(self) -> None:
        self.present: frozenset[int] = frozenset()
        self._slots = torch.empty(0, dtype=torch.int64)
        self._device = torch.device("cpu")
        self._known: dict[tuple[tuple[int, int], ...], _Rows] = {}

    def begin(self, batch: StepBatch, device: torch.device) -> None:
        """Take over the batch's slots: every forward pass begins with this."""
        self.present = frozenset(slot for slot in batch.adapter_slots if slot >= 0)
        self._known = {}
        if self.present:
            slots = torch.tensor(batch.adapter_slots).repeat_interleave(torch.tensor(batch.query_starts).diff())
            self._slots, self._device = torch.cat((slots, torch.full((-len(slots) % ROW_MULTIPLE,), -1))), device

    def of(self, page: _Page) -> _Rows:
        """Return the rows for a page; all maps with equal pages share them."""
        known = self._known.get(page.layout)
        if known is None:
            known = self._known[page.layout] = self._found(page)
        return known

    def _found(self, page: _Page) -> _Rows:
        slots, device = self._slots, self._device
        rows = torch.where(torch.isin(slots, torch.tensor(sorted(page.slots))))[0]
        if 2 * len(rows) >= len(slots):
            return _Rows(None, None, slots.to(device).unsqueeze(1) != page.owners)
        padded = pad_rows(rows)
        return _Rows(rows.to(device), padded.to(device), slots[padded].to(device).unsqueeze(1) != page.owners)


class AdaptedLinear:
    """Compute base(x) + B A x of each row's own adapter: [M, in] -> [M, out]."""

    def __init__(self, base: Linear, parts: Sequence[Part], outputs: int, rows: StepRows) -> None:
        self.base, self.kind = base, base.kind
        self._parts, self._outputs, self._rows = parts, outputs, rows
        self._adapters: list[dict[int, Adapter]] = []  # of each page
        self._pages: list[_Page] = []

    def __call__(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for page in self._pages:
            if not self._rows.present.isdisjoint(page.slots):
                result = _added(result, page, self._rows.of(page), x)
        return result

    def put(self, slot: int, adapter: Adapter, device: torch.device) -> None:
        """Take the adapter's maps at these parts, if it has any, into the first page with room."""
        width = self._width(adapter)
        if not width:
            return
        room = (n for n, page in enumerate(self._adapters) if sum(map(self._width, page.values())) + width <= PAGE_COLUMNS)
        number = next(room, len(self._adapters))
        if number == len(self._adapters):
            self._adapters.append({})
        self._adapters[number][slot] = adapter
        self._pages[number : number + 1] = [self._page(self._adapters[number], device)]

    def drop(self, slot: int, device: torch.device) -> None:
        """Compute a slot no longer."""
        for number, adapters in enumerate(self._adapters):
            if adapters.pop(slot, None) is None:
                continue
            if adapters:
                self._pages[number] = self._page(adapters, device)
            else:
                del self._adapters[number], self._pages[number]
            return

    def _width(self, adapter: Adapter) -> int:
        return sum(adapter.maps[part.site].rank for part in self._parts if part.site in adapter.maps)

    def _page(self, adapters: Mapping[int, Adapter], device: torch.device) -> _Page:
        pieces = [
            (slot, part, adapters[slot].maps[part.site])
            for slot in sorted(adapters)
            for part in self._parts
            if part.site in adapters[slot].maps
        ]
        down = torch.cat([found.a for _, _, found in pieces])
        up, column = torch.zeros(self._outputs, len(down)), 0
        for _, part, found in pieces:
            up[part.first : part.first + part.count, column : column + found.rank] = found.b
            column += found.rank
        owners = torch.tensor([slot for slot, _, found in pieces for _ in range(found.rank)])
        layout = tuple((slot, found.rank) for slot, _, found in pieces)
        products = make_linear(down.to(device)), make_linear(up.to(device))
        return _Page(frozenset(adapters), layout, owners.to(device), *products)


def _added(result: Tensor, page: _Page, own: _Rows, x: Tensor) -> Tensor:
    """Return the result [M, out], changed in place where it can be, with what the page's adapters add to their rows."""
    if own.rows is None or own.padded is None:
        return page(x, own.foreign).add_(result).to(result.dtype)
    added = page(x.index_select(0, own.padded), own.foreign)[: len(own.rows)]
    if result.dtype == torch.float32:
        return result.index_add_(0, own.rows, added)
    return result.index_copy_(0, own.rows, added.add_(result.index_select(0, own.rows)).to(result.dtype))


class TorchAdapters:
    """Put adapters into a decoder and take them out. Its maps are wrapped once; on the engine's thread, between steps."""

    def __init__(self, model: DecoderModel) -> None:
        self._device = model.device
        self._rows = StepRows()
        self._maps: list[AdaptedLinear] = []
        model.layers = [with_maps(index, layer, model.config, self._around) for index, layer in enumerate(model.layers)]
        model.adapter_rows = self._rows

    def put(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a free slot."""
        for each in self._maps:
            each.put(slot, adapter, self._device)

    def drop(self, slot: int) -> None:
        """Free a slot that no sequence uses."""
        for each in self._maps:
            each.drop(slot, self._device)

    def _around(self, base: Linear, parts: Sequence[Part]) -> AdaptedLinear:
        self._maps.append(AdaptedLinear(base, parts, parts[-1].first + parts[-1].count, self._rows))
        return self._maps[-1]


def with_maps(
    index: int, layer: DecoderLayer, config: ModelConfig, around: Callable[[Linear, Sequence[Part]], Linear]
) -> DecoderLayer:
    """Return the layer with a map around each product that adapters may change: `around` gets it, and the parts of its
    outputs. The MLP is changed in place."""
    mlp, inner, hidden = layer.mlp, config.intermediate_size, config.hidden_size
    if isinstance(mlp, GatedMLP):
        mlp.gate_up = around(mlp.gate_up, _parts(index, {"mlp.gate_proj": inner, "mlp.up_proj": inner}))
    elif isinstance(mlp, PlainMLP):
        mlp.up = around(mlp.up, _parts(index, {"mlp.up_proj": inner}))
    if isinstance(mlp, (GatedMLP, PlainMLP)):
        mlp.down = around(mlp.down, _parts(index, {"mlp.down_proj": hidden}))
    output = around(layer.output, _parts(index, {"self_attn.o_proj": hidden}))
    if config.latent is not None:
        return replace(layer, output=output)
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    return replace(layer, qkv=around(layer.qkv, _parts(index, parts)), output=output)


def _parts(layer: int, outputs: Mapping[str, int]) -> list[Part]:
    parts, first = [], 0
    for stem, count in outputs.items():
        parts.append(Part(Site(layer, stem), first, count))
        first += count
    return parts
