"""The receiving end of transfers: `Receiver` listens on every transport that its memory allows and serves inbound pushes."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.conversion import FP8Scales
from kvtransfer.errors import Incompatible, TransferRefused
from kvtransfer.grpc_stream import MessageStream, Wire
from kvtransfer.layout import Reach
from kvtransfer.manifest import KVMemory, check_memory, refuse, unknown_reservation
from kvtransfer.native.library import prepare
from kvtransfer.receiver.push import Host, InboundConnection, InboundPush, PushTarget, ReceiverDelegate
from kvtransfer.transports.base import Incoming, SocketTransport
from kvtransfer.transports.registry import GRPC, TRANSPORTS, defaults, socket_transports
from pdmesh.runtime.errors import MeshError, ResourceExhausted, Unavailable
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import common_pb2, transfer_pb2

__all__ = ["Incompatible", "PushTarget", "Receiver", "ReceiverDelegate", "TransferRefused"]

NUM_THREADS = 4
PUSH_ID_BYTES = 16
ACCEPT_RETRY_S = 0.1  # after the process ran out of descriptors
LAST_WRITE_S = 1.0  # limit for a message that gRPC is writing when its call ends

logger = logging.getLogger(__name__)


class Receiver:
    """Receive pushes into `memory`; the delegate accepts them, and is told how each ended.

    identity and layout are compared with every sender's. `transports` None: the default ones. host and port
    are tcp's (port 0, and nixl: any free one); advertise is the host that peers are told (None: `host`). `grpc_address` is
    the address of the worker's gRPC server, to be set once that has started; it passes calls on to `serve_push`.
    idle_timeout_s, the lease, bounds every wait for a sender. tls encrypts what crosses hosts (over nixl only the conversation);
    with secret, senders on other hosts prove that they are of the mesh.
    fp8_scales: see Conversion. Raises ValueError for an unknown transport or memory that does not have the shape of identity and
    layout.
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
        transports: Sequence[str] | None = None,
        advertise: str | None = None,
        idle_timeout_s: float = 5.0,
        max_connections: int = 256,
        tls: Tls | None = None,
        secret: MeshSecret | None = None,
        fp8_scales: FP8Scales = (),
    ) -> None:
        transports = defaults() if transports is None else transports
        unknown = [name for name in transports if name not in TRANSPORTS]
        if unknown:
            raise ValueError(f"transports: {', '.join(unknown)} unknown; there are {', '.join(TRANSPORTS)}")
        check_memory(memory, identity, layout)
        self._shared = Host(memory, delegate, identity, layout, fp8_scales)
        self.num_corrupt = self._shared.num_corrupt
        known = socket_transports(tls, secret).values()
        self._transports = [each for each in known if each.name in transports and each.receives(memory)]
        self.takes_calls = GRPC.name in transports
        self.grpc_address: str | None = None
        self._host, self._port, self._advertise = host, port, advertise
        self._idle_timeout_s = idle_timeout_s
        self._max_connections = max_connections
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-receive")
        self._listeners: list[tuple[SocketTransport, socket.socket]] = []
        self._is_running = False
        self._accepting: list[asyncio.Task[None]] = []
        self._connections: dict[asyncio.Task[None], InboundConnection] = {}
        self._pushes: dict[bytes, InboundPush] = {}  # running pushes by push_id

    async def start(self) -> None:
        """Listen. Raises OSError if an address is taken."""
        self._executor.submit(prepare)  # until it is ready, Python does the same work
        try:
            for transport in self._transports:
                listener = transport.listen(self._host, self._port)
                listener.setblocking(False)
                self._listeners.append((transport, listener))
        except OSError:
            await self.stop()
            raise
        self._is_running = True
        self._accepting = [asyncio.create_task(self._accept(*pair)) for pair in self._listeners]

    def endpoints(self) -> list[common_pb2.TransferEndpoint]:
        """Return the endpoints at which senders reach us, best first; empty before start()."""
        endpoints = [transport.endpoint(listener, self._advertise) for transport, listener in self._listeners]
        if self.takes_calls and self.grpc_address is not None:
            endpoints.append(GRPC.endpoint(self.grpc_address))
        return endpoints

    def reach(self) -> dict[str, Reach]:
        """Return the reach of each transport in `endpoints`, by name."""
        reach = {transport.name: transport.reach for transport, _ in self._listeners}
        return {**reach, GRPC.name: GRPC.reach} if self.takes_calls and self.grpc_address is not None else reach

    @property
    def num_connections(self) -> int:
        """Return the number of open connections."""
        return len(self._connections)

    async def quiesce(self, reservation_id: str) -> None:
        """Return when no writer is inside a part of this reservation. Call it after fencing, before its blocks are freed."""
        await asyncio.gather(*(push.quiesce() for push in self._pushes_into(reservation_id)))

    async def stop(self) -> None:
        """Stop listening, end every push (push_failed of the delegate is called) and wait for all threads; idempotent."""
        self._is_running = False
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for _, listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._executor.shutdown()
        for transport in self._transports:
            transport.close()

    async def serve_push(self, wire: Wire) -> None:
        """Serve a call of the worker's gRPC server, from its beginning to its end. Raises MeshError to reject it."""
        if not self._is_running:
            raise Unavailable("the receiver does not run")
        if self._is_full(GRPC.name):
            raise ResourceExhausted(f"{self._max_connections} connections are open already")
        stream = MessageStream(wire, self._executor, self._idle_timeout_s)
        self._connect(GRPC.accept(stream, self._shared.memory), GRPC.name)
        await stream.carry(LAST_WRITE_S)

    def _pushes_into(self, reservation_id: str) -> list[InboundPush]:
        return [push for push in self._pushes.values() if push.target.reservation_id == reservation_id]

    async def _accept(self, transport: SocketTransport, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                logger.error("cannot accept %s connections: %s", transport.name, error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._begin(transport, sock)

    def _begin(self, transport: SocketTransport, sock: socket.socket) -> None:
        if self._is_full(transport.name):
            sock.close()
            return
        try:
            incoming = transport.accept(sock, self._shared.memory, self._executor, self._idle_timeout_s)
        except OSError as error:
            logger.warning("closed a %s connection: %s", transport.name, error)
            sock.close()
            return
        self._connect(incoming, transport.name)

    def _is_full(self, transport: str) -> bool:
        if len(self._connections) < self._max_connections:
            return False
        logger.warning("closed a %s connection: %d are open already", transport, self._max_connections)
        return True

    def _connect(self, incoming: Incoming, transport: str) -> None:
        connection = InboundConnection(self._shared, incoming, transport)
        task = asyncio.create_task(self._run(connection))
        self._connections[task] = connection
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()  # once more: a task that is cancelled before its first step has not run
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection ended by a bug of ours", exc_info=error)

    async def _run(self, connection: InboundConnection) -> None:
        try:
            hello = await connection.hello()
            if hello is None:
                return
            try:
                if hello.connection:
                    self._join(connection, hello)
                else:
                    await self._open(connection, hello)
            except MeshError as refusal:
                await connection.refuse(refusal)
                return
            await connection.exchange()
        finally:
            push = connection.session
            connection.close()
            if push is not None and not push.connections and self._pushes.get(push.hello.push_id) is push:
                del self._pushes[push.hello.push_id]

    async def _open(self, connection: InboundConnection, hello: transfer_pb2.TransferHello) -> None:
        """Open a new push. Raises MeshError."""
        if len(hello.push_id) != PUSH_ID_BYTES or hello.push_id in self._pushes:
            raise refuse("push_id", f"give {PUSH_ID_BYTES} random bytes of your own")
        former = self._pushes_into(hello.reservation_id)
        push = InboundPush(self._shared, hello, connection.transport, self._idle_timeout_s)
        self._pushes[hello.push_id] = push
        connection.attach(push, hello)
        # One writer for each reservation: the former push has stopped writing before the new one is accepted.
        for each in former:
            each.interrupt()
        await asyncio.gather(*(each.quiesce() for each in former))

    def _join(self, connection: InboundConnection, hello: transfer_pb2.TransferHello) -> None:
        """Add one more connection to a running push. Raises MeshError."""
        push = self._pushes.get(hello.push_id)
        if push is None:
            raise unknown_reservation(hello.reservation_id)
        push.check_join(hello)
        connection.attach(push, hello)
