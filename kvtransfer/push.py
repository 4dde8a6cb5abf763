"""What a push is asked to do, and what it did."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.v1 import common_pb2, transfer_pb2


@dataclass(frozen=True)
class PushJob:
    """The KV of one request for one reservation.

    source_block_ids are the ids in the sender's pool of all blocks of the request, the prefix that decode holds included;
    num_tokens is how many tokens they hold; choices are the first tokens that travel with the commit.
    """

    reservation: common_pb2.Reservation
    source_block_ids: tuple[int, ...]
    num_tokens: int
    choices: Sequence[transfer_pb2.CommittedChoice]

    @property
    def first_block(self) -> int:
        """Index of the first block that decode lacks."""
        return self.reservation.num_cached_tokens // max(1, self.reservation.layout.block_size)


@dataclass(frozen=True)
class PushResult:
    """A committed push: num_bytes of KV in num_parts over `transport`, elapsed_ns from the call to the receipt of the commit."""

    transport: str
    num_bytes: int
    num_parts: int
    elapsed_ns: int
