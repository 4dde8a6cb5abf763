"""The decode service put together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from decode_service.lease_keeper import LeaseKeeper
from decode_service.ports import EngineCalls, Sinks
from decode_service.refusals import released_by_worker
from decode_service.requests import Reservations
from decode_service.servicer import DecodeServicer, Endpoints
from decode_service.settings import DecodeSettings
from decode_service.spans import DecodeSpans
from decode_service.token_stream import Outboxes
from decode_service.transfer_delegate import PushDelegate
from decode_service.validation import SubmitValidator, Translate
from kvtransfer.reservation import Failed
from pdmesh.v1 import common_pb2, worker_pb2


@dataclass(frozen=True)
class Surroundings:
    """What the worker around it gives. `quiesce` and `endpoints` are the KV receiver's."""

    epoch: int
    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    translate: Translate
    engine: EngineCalls
    sinks: Sinks
    quiesce: Callable[[str], Awaitable[None]]
    endpoints: Endpoints
    check_new_work: Callable[[], None]
    num_steps: Callable[[], int]
    load_report: Callable[[], worker_pb2.LoadReport]
    spans: DecodeSpans = field(default_factory=DecodeSpans)


class DecodeService:
    """Its parts, for the worker to register and run: `servicer`, `delegate` for the receiver, `keeper.run()` as a task."""

    def __init__(self, settings: DecodeSettings, around: Surroundings) -> None:
        self._outboxes = Outboxes(settings.stream, epoch=around.epoch, num_steps=around.num_steps, load_report=around.load_report)
        self.reservations = Reservations(
            settings.reservation,
            engine=around.engine,
            sinks=around.sinks,
            outboxes=self._outboxes,
            quiesce=around.quiesce,
            check_new_work=around.check_new_work,
            spans=around.spans,
        )
        self.delegate = PushDelegate(self.reservations, epoch=around.epoch, block_size=around.layout.block_size)
        self.keeper = LeaseKeeper(self.reservations, self._outboxes)
        self.servicer = DecodeServicer(
            self.reservations,
            self._outboxes,
            SubmitValidator(around.epoch, around.identity, around.translate),
            layout=around.layout,
            lease_s=settings.reservation.lease_s,
            stream_timeout_s=settings.stream.stream_timeout_s,
            endpoints=around.endpoints,
            spans=around.spans,
        )

    async def wait_idle(self) -> None:
        """Until no request holds anything in the engine."""
        await self.reservations.wait_idle()

    async def abandon(self, reason: str) -> None:
        """Gives up what runs: routers hear UNAVAILABLE and go on elsewhere. Returns when everything is released."""
        for record in self.reservations.active:
            await self.reservations.end(record, Failed(reason), released_by_worker(reason))
        await self.reservations.wait_idle()

    def close_streams(self) -> None:
        """Ends the routers' streams, each after a frame with what is due."""
        self._outboxes.close()
