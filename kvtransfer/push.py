"""What a push is asked to do, and what it did."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.feed import KVFeed
from protos.v1 import common_pb2


@dataclass(frozen=True)
class PushJob:
    """The KV of one request for one reservation.

    source_block_ids are the ids in the sender's pool of all blocks of the request, the prefix that decode holds included;
    num_tokens is how many tokens they hold; `feed` says what of them may be sent by now. While `num_steps()` grows the sender is
    at work, so the lease is kept though nothing is to be sent.
    """

    reservation: common_pb2.Reservation
    source_block_ids: tuple[int, ...]
    num_tokens: int
    feed: KVFeed
    num_steps: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class PushResult:
    """A push that ended as it should: num_bytes of KV in num_parts over `transport`, of which `num_exposed_bytes` were sent after
    the prefill had ended. elapsed_ns: from the call to the receipt of the commit. `committed`: there was something to decode."""

    transport: str
    num_bytes: int
    num_exposed_bytes: int
    num_parts: int
    elapsed_ns: int
    committed: bool
