"""What the receiver asks of the service that owns the reservations. All calls are made on the event loop."""

from dataclasses import dataclass
from typing import Protocol

from pdmesh.v1 import transfer_pb2


@dataclass(frozen=True)
class PushTarget:
    """Where an accepted push goes.

    block_ids are the pool ids of all blocks of the request, in order; those before index `first_block` are pinned prefix and are
    neither sent nor written. num_tokens is how many tokens' KV must be in place at commit, prefix included.
    """

    reservation_id: str
    attempt: int
    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int


class ReceiverDelegate(Protocol):
    """Implemented by decode_service."""

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        """Accept a sender whose identity, layout and memory were found compatible, or raise TransferRefused.

        It must check reservation, epoch, attempt and token (`grant.check_grant` does).
        """

    def push_progress(self, target: PushTarget) -> bool:
        """Renew the lease; False: the target is fenced (a newer attempt, or released) and nothing more is written."""

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        """Start the sequence: the manifest is complete and verified. Raises TransferRefused."""

    def push_failed(self, target: PushTarget, reason: str) -> None:
        """The session that `open_push` accepted ended without commit or finish. Also called for fenced targets."""

    def push_finished(self, target: PushTarget) -> None:
        """Every choice ended with its first token: the reservation is to be released."""
