"""What a push is asked to do, and what it did."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.feed import KVFeed
from pdmesh.v1 import common_pb2


@dataclass(frozen=True)
class PartMoved:
    """A group of layers of some blocks that the receiver has verified. Monotonic nanoseconds: `sent_ns` when its first byte was
    about to be sent, for the first time; `verified_ns` when the receiver's answer came."""

    layer_start: int
    layer_end: int
    num_blocks: int
    num_bytes: int
    transport: str
    sent_ns: int
    verified_ns: int

    def joined(self, other: "PartMoved") -> "PartMoved":
        """Both as one, from the first byte to the last answer."""
        return PartMoved(
            min(self.layer_start, other.layer_start),
            max(self.layer_end, other.layer_end),
            max(self.num_blocks, other.num_blocks),
            self.num_bytes + other.num_bytes,
            self.transport,
            min(self.sent_ns, other.sent_ns),
            max(self.verified_ns, other.verified_ns),
        )


@dataclass(frozen=True)
class PushJob:
    """The KV of one request for one reservation.

    source_block_ids are the ids in the sender's pool of all blocks of the request, the prefix that decode holds included;
    num_tokens is how many tokens they hold; `feed` says what of them may be sent by now. While `num_steps()` grows the sender is
    at work, so the lease is kept though nothing is to be sent. `on_part` hears of each part once the receiver has it.
    """

    reservation: common_pb2.Reservation
    source_block_ids: tuple[int, ...]
    num_tokens: int
    feed: KVFeed
    num_steps: Callable[[], int] = lambda: 0
    on_part: Callable[[PartMoved], None] | None = None


@dataclass(frozen=True)
class PushResult:
    """A push that ended as it should: num_bytes of KV in num_parts over `transport`, of which `num_exposed_bytes` were sent after
    the prefill had ended. Monotonic nanoseconds: `started_ns` of the call, `ended_ns` when the receiver had acknowledged the end.
    `committed`: there was something to decode."""

    transport: str
    num_bytes: int
    num_exposed_bytes: int
    num_parts: int
    started_ns: int
    ended_ns: int
    committed: bool

    @property
    def elapsed_ns(self) -> int:
        return self.ended_ns - self.started_ns
