# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""What LoRA adapters add to a product, for rows of several adapters in one launch: y += B (A x) of each row's own adapter.

    slots     row 0: 2   row 1: -   row 2: 0   row 3: 2          read on the device, so that a graph serves any division
    order     2 | | 0 3                                          rows by adapter (experts/routing.py sorts them, once a step)
    shrink    x [T, in] of the order, A of the slot   ─►  parts [shares of in, T, ranks of q | k | v]     float32
    expand    sum of the shares, B of the slot        ─►  added to y [T, out], rounded to y's dtype

Tiles are of 16 rows of one adapter, found as experts' are (experts/product.py), and programs behind the last tile end at once.
A and B of all slots lie in one tensor each, which is filled in place: what a graph was recorded over stays where it is. Each
program reads its adapter's own rank, and walks as many ranks, 16 at a time; so an adapter of few costs what it has, however
many there is room for.

Bits: a tile has 16 rows whatever the step is, sums are over the inputs in order within shares that the map's width decides, and
then over the shares. So a row's bits depend on its own adapter alone: neither on its slot, nor on other rows, nor on the room.
A and B have the model's dtype, sums are float32, and the ranks between the two products are rounded to the model's dtype.

Limits: a step reads A and B of each adapter that any of its rows has, once for 16 of its rows. Counted, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.experts.product import _tile_of
from pdmesh.engine.kernels.triton.experts.routing import SORTED, sort_kernel
from pdmesh.engine.kernels.triton.launching import settle_keys

RANK_MULTIPLE = 16  # ranks that a product takes at a time
TILE = 16  # rows of a program
_OUTPUTS = 64  # of a program that expands
_COLUMNS = 64  # inputs that a program shrinks at a time
_SHARE, _MOST_SHARES = 512, 8  # inputs that a program shrinks, at least, and the most of such programs
_STEP_SIZES = ["num_rows", "num_shares"]  # numbers that kernels are not specialized for


@triton.jit(do_not_specialize=_STEP_SIZES)
def lora_shrink_kernel(
    x, order, starts, ranks, a, parts, num_rows, stride_x, K, share, room,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (share of the inputs and part, tile): x [T, K] -> parts [shares, T, PARTS * room], in the order."""
    split = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    slot, first, end = _tile_of(tl.program_id(1), starts, SLOTS, SLOTS_PAD, BLOCK_M)
    if slot >= SLOTS:
        return
    m = first + tl.arange(0, BLOCK_M)
    alive = m < end
    rows = x + tl.load(order + m, mask=alive, other=0).to(tl.int64) * stride_x
    r = tl.arange(0, BLOCK_R)
    at = slot.to(tl.int64) * PARTS + part
    target = parts + (split.to(tl.int64) * num_rows + m)[None, :] * (PARTS * room) + part * room + r[:, None]
    last = tl.minimum(K, (split + 1) * share)
    for rank in range(0, tl.load(ranks + at), BLOCK_R):
        own = a + (at * room + rank + r)[:, None] * K
        total = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for column in range(split * share, last, COLUMNS):
            k = column + tl.arange(0, COLUMNS)
            w = tl.load(own + k[None, :], mask=(k < K)[None, :], other=0.0)
            here = tl.load(rows[None, :] + k[:, None], mask=alive[None, :] & (k < K)[:, None], other=0.0)
            total = tl.dot(w, here, total, input_precision="ieee")
        tl.store(target + rank, total, mask=alive[None, :])


@triton.jit(do_not_specialize=_STEP_SIZES)
def lora_expand_kernel(
    parts, order, starts, ranks, b, blocks, y, num_rows, num_shares, stride_y, N, room,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, tile): y [T, N] += B of the slot times the sum of the shares. blocks: part, first output and
    the end of the part, of each block."""
    block = blocks + 3 * tl.program_id(0)
    part, output, behind = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    slot, first, end = _tile_of(tl.program_id(1), starts, SLOTS, SLOTS_PAD, BLOCK_M)
    if slot >= SLOTS:
        return
    at = slot.to(tl.int64) * PARTS + part
    own_rank = tl.load(ranks + at)
    if own_rank == 0:
        return
    m = first + tl.arange(0, BLOCK_M)
    alive = m < end
    r, n = tl.arange(0, BLOCK_R), output + tl.arange(0, BLOCK_N)
    source = parts + m.to(tl.int64)[None, :] * (PARTS * room) + part * room + r[:, None]
    step = num_rows.to(tl.int64) * (PARTS * room)
    own = b + (slot.to(tl.int64) * N + n)[:, None] * room + r[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for rank in range(0, own_rank, BLOCK_R):
        shrunk = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for share in range(num_shares):
            shrunk += tl.load(source + share * step + rank, mask=alive[None, :], other=0.0)
        w = tl.load(own + rank, mask=(n < behind)[:, None], other=0.0)
        total = tl.dot(w, shrunk.to(w.dtype), total, input_precision="ieee")
    row = tl.load(order + m, mask=alive, other=0).to(tl.int64)
    place = y + row[None, :] * stride_y + n[:, None]
    inside = alive[None, :] & (n < behind)[:, None]
    result = tl.load(place, mask=inside, other=0.0).to(tl.float32) + total
    tl.store(place, result.to(y.dtype.element_ty), mask=inside)


settle_keys(globals())


@dataclass(frozen=True)
class AdapterGroups:
    """Hold the rows of a step by adapter: buffers that `sort` fills on the device."""

    slots: Tensor  # [T] int32; NO_ADAPTER (metadata.py): none
    order: Tensor  # [T] int32; behind the last start not defined
    starts: Tensor  # [places + 1] int32: where each slot's rows begin, and the end
    counts: Tensor  # [places] int64: rows of each slot since start

    @property
    def num_places(self) -> int:
        return len(self.counts)

    @property
    def num_tiles(self) -> int:
        """Return the most tiles that any division of the rows has."""
        return min(len(self.slots), len(self.slots) // TILE + self.num_places)

    def over(self, slots: Tensor) -> AdapterGroups:
        """Return groups of other rows, no more than these, in the same buffers."""
        return replace(self, slots=slots, order=self.order[: len(slots)])

    def sort(self) -> None:
        """Sort the rows by their slots."""
        sort_kernel[(self.num_places + 1,)](
            self.slots, self.order, self.starts, self.counts, len(self.slots),
            EXPERTS=self.num_places, BLOCK=SORTED, num_warps=4,
        )  # fmt: skip


class AdapterRows:
    """Share among the maps of a model which rows of the running step have which adapter. `current` None: none has one."""

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.current: AdapterGroups | None = None
        self._counts = torch.zeros(num_places, dtype=torch.int64, device=device)

    def groups_of(self, slots: Tensor) -> AdapterGroups:
        """Return buffers for rows whose slots [T] will be in this tensor."""
        starts = slots.new_empty(len(self._counts) + 1)
        return AdapterGroups(slots, torch.empty_like(slots), starts, self._counts)


class AdapterWeights:
    """Hold A and B of all places for one product, whose outputs are `parts` one after the other, with an A of their own each."""

    def __init__(self, num_places: int, room: int, inputs: int, parts: Sequence[int], like: Tensor) -> None:
        """`room`: ranks of a part, a multiple of 16. `parts`: their numbers of outputs. `like`: dtype and device."""
        self.parts, self.outputs, self.inputs, self.room = tuple(parts), sum(parts), inputs, room
        self.a = like.new_zeros((num_places, len(parts), room, inputs))
        self.b = like.new_zeros((num_places, self.outputs, room))
        self.ranks = torch.zeros((num_places, len(parts)), dtype=torch.int32, device=like.device)
        self._blocks = torch.tensor(_blocks_of(parts), dtype=torch.int32, device=like.device)
        wanted = min(_MOST_SHARES, -(-inputs // _SHARE))
        self._share = -(-inputs // (wanted * _COLUMNS)) * _COLUMNS
        self._num_shares = -(-inputs // self._share)

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @property
    def num_columns(self) -> int:
        """Return the float32 numbers that a row has between the two products."""
        return columns_of(self.inputs, len(self.parts), self.room)

    def put(self, slot: int, maps: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Fill a place with A [rank, inputs] and B [outputs, rank] of each part, None: the part has none. On the device's
        stream: steps that were launched before see what was there."""
        self.drop(slot)
        first, ranks = 0, [0] * len(self.parts)
        for number, (count, own) in enumerate(zip(self.parts, maps, strict=True)):
            if own is not None:
                rank = len(own[0])
                ranks[number] = rank + -rank % RANK_MULTIPLE
                self.a[slot, number, :rank] = own[0].to(self.a)
                self.b[slot, first : first + count, :rank] = own[1].to(self.b)
            first += count
        self.ranks[slot] = torch.tensor(ranks, dtype=torch.int32)

    def drop(self, slot: int) -> None:
        """Empty a place."""
        for tensor in (self.ranks, self.a, self.b):
            tensor[slot] = 0

    def add(self, x: Tensor, y: Tensor, groups: AdapterGroups) -> None:
        """Add to y [T, outputs] what the adapters of the rows x [T, inputs] do."""
        num_rows, num_parts = len(x), len(self.parts)
        parts = x.new_empty((self._num_shares, num_rows, num_parts * self.room), dtype=torch.float32)
        sizes = {"PARTS": num_parts, "SLOTS": groups.num_places, "SLOTS_PAD": triton.next_power_of_2(groups.num_places)}
        sizes |= {"BLOCK_M": TILE, "BLOCK_R": RANK_MULTIPLE, "num_warps": 4, "num_stages": 1 if x.dtype == torch.float32 else 3}
        lora_shrink_kernel[(self._num_shares * num_parts, groups.num_tiles)](
            x, groups.order, groups.starts, self.ranks, self.a, parts, num_rows, x.stride(0), self.inputs, self._share, self.room,
            COLUMNS=_COLUMNS, **sizes,
        )  # fmt: skip
        lora_expand_kernel[(len(self._blocks), groups.num_tiles)](
            parts, groups.order, groups.starts, self.ranks, self.b, self._blocks, y, num_rows, self._num_shares, y.stride(0),
            self.outputs, self.room, BLOCK_N=_OUTPUTS, **sizes,
        )  # fmt: skip


def columns_of(inputs: int, num_parts: int, room: int) -> int:
    """Return the most numbers that a row has between the products of such a map."""
    return min(_MOST_SHARES, -(-inputs // _SHARE)) * num_parts * room


def _blocks_of(parts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return part, first output and the part's end of each block of outputs; no block has outputs of two parts."""
    blocks, first = [], 0
    for number, count in enumerate(parts):
        blocks += [(number, at, first + count) for at in range(first, first + count, _OUTPUTS)]
        first += count
    return blocks
