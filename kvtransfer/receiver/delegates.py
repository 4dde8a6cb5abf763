"""The decision about a push into a worker: it is a hand-off, or brings blocks that the worker has asked for itself."""

from __future__ import annotations

from kvtransfer.receiver.push import PushTarget, ReceiverDelegate
from pdmesh.v1 import transfer_pb2

PULL_PREFIX = "."
"""The beginning of ids of reservations for blocks that a worker asks for. Those of hand-offs begin with a request's id."""


class Delegates:
    """Pass each push on by its reservation (`ReceiverDelegate`)."""

    def __init__(self, handoffs: ReceiverDelegate, pulls: ReceiverDelegate | None) -> None:
        self._handoffs, self._pulls = handoffs, pulls

    def open_push(self, hello: transfer_pb2.TransferHello) -> PushTarget:
        return self.of(hello.reservation_id).open_push(hello)

    def push_progress(self, target: PushTarget) -> bool:
        return self.of(target.reservation_id).push_progress(target)

    async def commit_push(
        self, target: PushTarget, commit: transfer_pb2.TransferCommit, *, num_bytes: int, transport: str
    ) -> None:
        await self.of(target.reservation_id).commit_push(target, commit, num_bytes=num_bytes, transport=transport)

    def push_failed(self, target: PushTarget, reason: str) -> None:
        self.of(target.reservation_id).push_failed(target, reason)

    def push_finished(self, target: PushTarget) -> None:
        self.of(target.reservation_id).push_finished(target)

    def of(self, reservation_id: str) -> ReceiverDelegate:
        """Return the delegate of this reservation."""
        is_pull = reservation_id.startswith(PULL_PREFIX)
        return self._pulls if is_pull and self._pulls is not None else self._handoffs
