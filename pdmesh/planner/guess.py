"""Where a search begins: capacity arithmetic says how many workers each pool of a mesh would need. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.planner.meshes import Shape, Size, WorkerKind
from pdmesh.planning.capacity import DecodePool, Pool, PrefillPool, SharedPool, bearable, fewest
from pdmesh.planning.capacity_load import Goals, Load

MOST_WORKERS = 512
"""Of a pool. More than that is not planned for."""


@dataclass
class Guesser:
    """For one load and its objectives. Arithmetic alone: bursts, hand-offs and admission are left to simulation."""

    load: Load
    goals: Goals
    _rates: dict[tuple[Pool, int], float] = field(default_factory=dict)
    _sizes: dict[Pool, int] = field(default_factory=dict)

    def size(self, shape: Shape) -> Size:
        """Workers that should do; as many as are planned for at most, where none would."""
        prefill, decode = self._pools(shape)
        return Size(0 if prefill is None else self._fewest(prefill), self._fewest(decode))

    def ranked(self, shapes: Iterable[Shape]) -> list[Shape]:
        """Those first that should be cheapest; of equally cheap ones those that should bear most."""
        return sorted(shapes, key=lambda shape: (shape.cost(self.size(shape)), -self.rate(shape, self.size(shape))))

    def in_order(self, shape: Shape, sizes: Sequence[Size]) -> list[Size]:
        """Those first that should bear most."""
        return list(sizes) if len(sizes) < 2 else sorted(sizes, key=lambda size: -self.rate(shape, size))

    def rate(self, shape: Shape, size: Size) -> float:
        """Requests a second that it should bear: as many as the weaker pool."""
        prefill, decode = self._pools(shape)
        rates = [self._rate(decode, size.num_decode)]
        return min(rates if prefill is None else [*rates, self._rate(prefill, size.num_prefill)])

    def _rate(self, pool: Pool, num: int) -> float:
        if (pool, num) not in self._rates:
            self._rates[pool, num] = bearable(pool, self.load, num)
        return self._rates[pool, num]

    def _fewest(self, pool: Pool) -> int:
        if pool not in self._sizes:
            self._sizes[pool] = fewest(pool, self.load, MOST_WORKERS) or MOST_WORKERS
        return self._sizes[pool]

    def _pools(self, shape: Shape) -> tuple[PrefillPool | None, Pool]:
        if shape.prefill is None:
            return None, SharedPool(shape.decode.worker, self.goals)
        return PrefillPool(shape.prefill.worker, self.goals), DecodePool(shape.decode.worker, self.goals)


def shapes_of(kinds: Sequence[WorkerKind], *, aggregated: bool, separated: bool) -> list[Shape]:
    """All that can be made of these kinds. Prefill workers differ by what they compute in a step, not by how many sequences."""
    shapes = [Shape(kind) for kind in kinds] if aggregated else []
    widest: dict[tuple[int, int], WorkerKind] = {}
    for kind in kinds:
        key = (kind.num_devices, kind.spec.max_num_batched_tokens)
        if key not in widest or kind.spec.max_num_seqs > widest[key].spec.max_num_seqs:
            widest[key] = kind
    return shapes + [Shape(kind, prefill) for kind in kinds for prefill in widest.values()] if separated else shapes
