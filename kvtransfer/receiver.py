"""The decode worker's end: listens on every transport that its memory allows and runs one session for each connection."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.compatibility import check_memory
from kvtransfer.delegate import PushTarget, ReceiverDelegate
from kvtransfer.errors import Incompatible, TransferRefused
from kvtransfer.memory import KVMemory
from kvtransfer.session import Host, Session
from kvtransfer.transports.base import Transport
from kvtransfer.transports.registry import TRANSPORTS
from protos.v1 import common_pb2
from runtime.errors import MeshError

__all__ = ["Incompatible", "PushTarget", "Receiver", "ReceiverDelegate", "TransferRefused"]

NUM_THREADS = 4
ACCEPT_RETRY_S = 0.1  # after running out of descriptors

logger = logging.getLogger(__name__)


class Receiver:
    """Takes pushes into `memory`; the delegate decides which, and hears how each ended.

    identity and layout are compared with every sender's. host and port are tcp's (port 0: any free one); advertise is the host
    that peers are told (None: `host`). idle_timeout_s, the lease, bounds every wait for a sender. Raises ValueError for an
    unknown transport or memory that does not have the shape of identity and layout.
    """

    def __init__(
        self,
        memory: KVMemory,
        delegate: ReceiverDelegate,
        identity: common_pb2.Identity,
        layout: common_pb2.KVLayout,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        transports: Sequence[str] = ("shm", "tcp"),
        advertise: str | None = None,
        idle_timeout_s: float = 5.0,
        max_sessions: int = 128,
    ) -> None:
        unknown = [name for name in transports if name not in TRANSPORTS]
        if unknown:
            raise ValueError(f"transports: {', '.join(unknown)} unknown; there are {', '.join(TRANSPORTS)}")
        check_memory(memory, identity, layout)
        self._shared = Host(memory, delegate, identity, layout)
        self._transports = [each for each in TRANSPORTS.values() if each.name in transports and each.receives()]
        self._host, self._port, self._advertise = host, port, advertise
        self._idle_timeout_s = idle_timeout_s
        self._max_sessions = max_sessions
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-receive")
        self._listeners: list[tuple[Transport, socket.socket]] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._sessions: dict[asyncio.Task[None], Session] = {}

    async def start(self) -> None:
        """Listen. Raises OSError if an address is taken."""
        try:
            for transport in self._transports:
                listener = transport.listen(self._host, self._port)
                listener.setblocking(False)
                self._listeners.append((transport, listener))
        except OSError:
            await self.stop()
            raise
        self._accepting = [asyncio.create_task(self._accept(*pair)) for pair in self._listeners]

    def endpoints(self) -> list[common_pb2.TransferEndpoint]:
        """Where senders reach us, best first; empty before start()."""
        return [transport.endpoint(listener, self._advertise) for transport, listener in self._listeners]

    @property
    def num_sessions(self) -> int:
        """Connections that are open now."""
        return len(self._sessions)

    async def quiesce(self, reservation_id: str) -> None:
        """Return when no writer is inside a part of this reservation. Call it after fencing, before its blocks are given away."""
        await asyncio.gather(*(session.quiesce() for session in self._sessions_of(reservation_id)))

    async def stop(self) -> None:
        """Stop listening, end every session (the delegate hears push_failed) and wait for all threads; idempotent."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for _, listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for task in self._sessions:
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)
        self._executor.shutdown()

    def _sessions_of(self, reservation_id: str) -> list[Session]:
        return [s for s in self._sessions.values() if s.target is not None and s.target.reservation_id == reservation_id]

    async def _accept(self, transport: Transport, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                logger.error("cannot accept %s connections: %s", transport.name, error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._begin(transport, sock)

    def _begin(self, transport: Transport, sock: socket.socket) -> None:
        if len(self._sessions) >= self._max_sessions:
            logger.warning("closed a %s connection: %d sessions are open already", transport.name, self._max_sessions)
            sock.close()
            return
        try:
            incoming = transport.accept(sock, self._shared.memory, self._executor, self._idle_timeout_s)
        except OSError as error:
            logger.warning("closed a %s connection: %s", transport.name, error)
            sock.close()
            return
        session = Session(self._shared, incoming, transport.name)
        task = asyncio.create_task(self._run(session))
        self._sessions[task] = session
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._sessions[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a session ended by a bug of ours", exc_info=error)

    async def _run(self, session: Session) -> None:
        try:
            hello = await session.hello()
            if hello is None:
                return
            former = self._sessions_of(hello.reservation_id)
            try:
                session.open(hello)
            except MeshError as refusal:
                await session.refuse(refusal)
                return
            # One writer for each reservation: whoever filled it before is out before the new one hears "go".
            await self._supersede(former)
            await session.exchange()
        finally:
            session.close()

    async def _supersede(self, former: Sequence[Session]) -> None:
        for session in former:
            session.interrupt()
        await asyncio.gather(*(session.quiesce() for session in former))
