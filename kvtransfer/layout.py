"""The layout of a worker's KV, and which layouts convert into which. It imports nothing, so that routers can use it too."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

CONVERTIBLE_DTYPES = frozenset({"float32", "bfloat16", "float16", "int8", "float8_e4m3fn"})
MAX_BLOCK_SIZE = 1 << 16
PANEL = 16  # equals GROUP of kvtransfer/conversion.py
JOINED = "joined-"
"""The beginning of an arrangement whose keys and values of a block lie together, in an order that nothing here converts: such KV
goes only to pools with the same layout (vLLM's: pdmesh_vllm/)."""


def num_planes(arrangement: str) -> int:
    """Return the planes of a layer in a pool: 2, all keys and all values; 1 where they are joined."""
    return 1 if arrangement.startswith(JOINED) else 2


class WireLayout(Protocol):
    """Name the fields of `common_pb2.KVLayout` that this module reads."""

    @property
    def block_size(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def tensor_parallel_rank(self) -> int: ...
    @property
    def arrangement(self) -> str: ...


@dataclass(frozen=True)
class Layout:
    """Describe how KV lies in one worker's pool: tokens of a block, element type, its share of the KV heads, order of the
    numbers."""

    block_size: int
    kv_dtype: str
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    arrangement: str = "plain"

    @classmethod
    def of(cls, wire: WireLayout) -> "Layout":
        return cls(wire.block_size, wire.kv_dtype, wire.tensor_parallel_size, wire.tensor_parallel_rank, wire.arrangement)

    def problem(self, num_kv_heads: int, head_dim: int) -> tuple[str, str] | None:
        """Return (field, what is wrong) for a layout that no worker can have; None for others."""
        if not 0 < self.block_size <= MAX_BLOCK_SIZE:
            return "block_size", f"{self.block_size} is not in [1, {MAX_BLOCK_SIZE}]"
        if self.tensor_parallel_size < 1 or num_kv_heads % self.tensor_parallel_size:
            return "tensor_parallel_size", f"{self.tensor_parallel_size} does not divide {num_kv_heads} KV heads"
        if not 0 <= self.tensor_parallel_rank < self.tensor_parallel_size:
            return "tensor_parallel_rank", f"{self.tensor_parallel_rank} is not in [0, {self.tensor_parallel_size})"
        if self.arrangement == "panels" and (self.block_size % PANEL or head_dim % PANEL):
            return "arrangement", f"panels have groups of {PANEL} tokens and dimensions, not {self.block_size} and {head_dim}"
        return None

    def difference(self, other: "Layout") -> str | None:
        """Return the field that prevents a conversion of this layout's KV into the other layout; None: it converts, or is the
        same."""
        if self.arrangement != other.arrangement:
            return "arrangement"
        if num_planes(self.arrangement) == 1:
            fields = ("block_size", "kv_dtype", "tensor_parallel_size", "tensor_parallel_rank")
            return next((field for field in fields if getattr(self, field) != getattr(other, field)), None)
        same = self.kv_dtype == other.kv_dtype
        return None if same or {self.kv_dtype, other.kv_dtype} <= CONVERTIBLE_DTYPES else "kv_dtype"

    def heads(self, num_kv_heads: int) -> range:
        """Return the KV heads in this worker's pool."""
        count = num_kv_heads // self.tensor_parallel_size
        return range(self.tensor_parallel_rank * count, (self.tensor_parallel_rank + 1) * count)

    def ranks_with(self, heads: range, num_kv_heads: int) -> range:
        """Return the ranks of a worker with this layout's tensor-parallel size that hold any of these heads."""
        count = num_kv_heads // self.tensor_parallel_size
        return range(heads.start // count, (heads.stop - 1) // count + 1)


# Reach: the workers between which a transport moves KV. Transports declare it, workers register it, routers compare it, so the
# router knows no transport by name. This module imports only the standard library, because routers use it too.
#
# A worker of a version before `WorkerInfo.transport_reach` does not register it (None here). The other end's reach then counts
# for both, because the transport is the same. Where neither end registers it, the transport is assumed to reach: such a pair may
# be chosen in vain, but without harm, because a sender uses only endpoints that it reaches, a receiver refuses a layout that it
# cannot take, and the router then has another worker compute the prompt.


class Scope(enum.Enum):
    """Name how far apart two workers may be. The values are those of `worker_pb2.ReachScope`."""

    PROCESS = 1
    HOST = 2
    EVERYWHERE = 3


class WireReach(Protocol):
    """Name the fields of `worker_pb2.TransportReach` that this module reads."""

    @property
    def scope(self) -> int: ...
    @property
    def same_layout(self) -> bool: ...


@dataclass(frozen=True)
class Reach:
    """Describe the workers that one transport reaches. `same_layout`: it moves blocks as they are and converts nothing."""

    scope: Scope
    same_layout: bool = False

    @classmethod
    def of(cls, wire: WireReach) -> "Reach | None":
        """Return the reach in the message; None if the message has none. Raises ValueError for a scope of a later version."""
        return cls(Scope(wire.scope), wire.same_layout) if wire.scope else None

    def covers(self, *, same_process: bool, same_host: bool, same_layout: bool) -> bool:
        """Return whether the transport moves KV between two workers at this distance."""
        if self.same_layout and not same_layout:
            return False
        return self.scope is Scope.EVERYWHERE or (same_host if self.scope is Scope.HOST else same_process)


EVERYWHERE = Reach(Scope.EVERYWHERE)


class Transports(NamedTuple):
    """Describe what one worker offers: pairs of a transport's name and its reach. `reach_all`: one of them reaches every worker
    that offers the same transports."""

    offers: frozenset[tuple[str, Reach | None]]
    reach_all: bool

    @classmethod
    def of(cls, reach: Mapping[str, Reach | None]) -> "Transports":
        """Return the transports with these names."""
        return cls(frozenset(reach.items()), any(each in (None, EVERYWHERE) for each in reach.values()))

    def meet(self, others: "Transports", *, same_process: bool, same_host: bool, same_layout: bool) -> bool:
        """Return whether a transport that both workers offer reaches from one to the other."""
        theirs = dict(others.offers)
        for name, reach in self.offers:
            if name in theirs and all(
                said.covers(same_process=same_process, same_host=same_host, same_layout=same_layout)
                for said in (reach, theirs[name])
                if said is not None
            ):
                return True
        return False
