"""grpc: a call to the worker's own gRPC server carries what tcp carries on a socket; for where no other port is open.

A connection of a push is one call on a channel of its own, so that the end of one does not disturb the others.
"""

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Executor
from typing import Protocol

import grpc
import grpc.aio

from kvtransfer.errors import TransportUnavailable
from kvtransfer.grpc_stream import MessageStream, Wire
from kvtransfer.layout import EVERYWHERE
from kvtransfer.manifest import KVMemory
from kvtransfer.transports.common import InlineIncoming, InlineOutgoing
from pdmesh.runtime.rpc.channel import connect
from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.tls import Tls
from pdmesh.v1 import common_pb2

CONNECT_TIMEOUT_S = 1.0
SERVICE = "pdmesh.v1.TransferService"
METHOD = "Push"


class PushService(Protocol):
    """Serve calls of TransferService.Push; the receiver implements it."""

    def serve_push(self, wire: Wire) -> Awaitable[None]:
        """Serve one call from its beginning to its end. Raises MeshError to reject it."""


def add_push_service(service: PushService, server: grpc.aio.Server) -> None:
    """Register TransferService.Push with `server`, its messages as bytes: `grpc_stream` parses them without a copy."""

    async def push(_requests: object, context: Wire) -> None:
        await service.serve_push(context)

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(push)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))


class DialledStream(MessageStream):
    """Implement the caller's end of a stream; it owns `channel` until close()."""

    def __init__(self, channel: grpc.aio.Channel, executor: Executor, reply_timeout_s: float) -> None:
        self._channel = channel
        push: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = push()
        super().__init__(self._call, executor, reply_timeout_s)
        self._carrying = asyncio.create_task(self._carry_and_close())

    async def wait_closed(self) -> None:
        await asyncio.shield(self._carrying)

    async def _carry_and_close(self) -> None:
        try:
            await self.carry()
        finally:
            self._call.cancel()
            await self._channel.close()


class GrpcTransport:
    """Transfer between any two hosts, through the gRPC port that every worker has open."""

    name = "grpc"
    reach = EVERYWHERE
    summary = "needs no port but gRPC's"
    is_default = True
    gains_by_connections = True
    max_shown_bytes = None

    def __init__(self, tls: Tls | None = None, secret: MeshSecret | None = None) -> None:
        self._tls, self._secret = tls, secret

    def sends(self, memory: KVMemory) -> bool:
        return True

    def receives(self, memory: KVMemory) -> bool:
        return True

    def reaches(self, endpoint: common_pb2.TransferEndpoint) -> bool:
        return True

    def endpoint(self, address: str) -> common_pb2.TransferEndpoint:
        """Return the endpoint of the gRPC server at `address`, "host:port"."""
        return common_pb2.TransferEndpoint(transport=self.name, address=address)

    async def connect(
        self, endpoint: common_pb2.TransferEndpoint, memory: KVMemory, executor: Executor, reply_timeout_s: float
    ) -> InlineOutgoing:
        channel = connect(endpoint.address, tls=self._tls, secret=self._secret)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await _connected(channel)
        except OSError as error:  # TimeoutError is one
            await channel.close()
            raise TransportUnavailable(f"grpc: cannot connect to {endpoint.address}: {error or 'timed out'}") from error
        except BaseException:
            await channel.close()
            raise
        return InlineOutgoing(DialledStream(channel, executor, reply_timeout_s), f"grpc: {endpoint.address}")

    def accept(self, stream: MessageStream, memory: KVMemory) -> InlineIncoming:
        """Take over the stream of a call."""
        return InlineIncoming(stream)

    def close(self) -> None:
        """Do nothing: nothing outlives the connections."""


async def _connected(channel: grpc.aio.Channel) -> None:
    """Wait for the connection. Raises ConnectionError at the first attempt that fails: gRPC itself would retry for ever."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise ConnectionError("no server answers")
        await channel.wait_for_state_change(state)
