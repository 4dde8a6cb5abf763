"""gRPC channels to other processes of the mesh. Needs grpcio only: the client library uses it too."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import grpc.aio

from pdmesh.runtime.rpc.mesh_secret import MeshSecret
from pdmesh.runtime.rpc.proof import proving
from pdmesh.runtime.rpc.tls import Tls

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class Keepalive(NamedTuple):
    """Hold how long a peer may be silent before it is asked for a sign of life, and how long it has to give it, in seconds.
    gRPC's own threads answer, so one that is only slow does."""

    quiet_s: float
    limit_s: float


PATIENT = Keepalive(10.0, 5.0)
WITHIN_MESH = Keepalive(1.0, 1.5)
"""Of a router, which hears each worker ten times a second: where something on the way has forgotten the connection, the worker is
back over a new one after two and a half seconds of silence. Its requests are elsewhere by then, if there is another one."""

Option = tuple[str, int | str]


def connect(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    keepalive: Keepalive = PATIENT,
    tls: Tls | None = None,
    secret: MeshSecret | None = None,
) -> grpc.aio.Channel:
    """Return a channel to "host:port". It connects at the first call and again, soon, whenever the connection is lost. Close it
    after use.

    It uses no proxy (mesh traffic stays in its network) and its own connection, so that closing the channel closes it. With `tls`
    it is encrypted, and the server must be one of the mesh. With `secret` each call proves that the caller is."""
    options: list[Option] = [
        *message_size_options(max_message_bytes),
        ("grpc.keepalive_time_ms", round(keepalive.quiet_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.limit_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(keepalive.limit_s * 1000)),  # what grpcio 1.85 goes by; a minute by default
        ("grpc.keepalive_permit_without_calls", 1),
        # gRPC's own back-off reaches two minutes; a restarted worker should serve within a second of being ready.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 300),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is None:
        return proving(grpc.aio.insecure_channel(address, options=options), secret)
    options += tls.channel_options
    return proving(grpc.aio.secure_channel(address, tls.channel_credentials(), options=options), secret)


def message_size_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return the options that bound messages in both directions, for channels and servers."""
    return [("grpc.max_send_message_length", max_message_bytes), ("grpc.max_receive_message_length", max_message_bytes)]


class Channels:
    """Cache one channel for each address, opened at first use. On one event loop."""

    def __init__(
        self,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        keepalive: Keepalive = PATIENT,
        tls: Tls | None = None,
        secret: MeshSecret | None = None,
    ) -> None:
        self._tls, self._secret, self._keepalive = tls, secret, keepalive
        self._max_message_bytes = max_message_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._given: dict[str, grpc.aio.Channel] = {}
        self._opened_with: dict[str, int] = {}  # the version of the certificates, as Tls counts them

    def put(self, address: str, channel: grpc.aio.Channel) -> None:
        """Have `channel` lead to `address` from now on. It stays until `close`, which closes it."""
        self._given[address] = channel

    def get(self, address: str) -> grpc.aio.Channel:
        """Return the channel to `address`; owned by this cache."""
        if address in self._given:
            return self._given[address]
        if address not in self._channels:
            self._opened_with[address] = self._num_changes()
            self._channels[address] = connect(
                address,
                max_message_bytes=self._max_message_bytes,
                keepalive=self._keepalive,
                tls=self._tls,
                secret=self._secret,
            )
        return self._channels[address]

    def is_outdated(self, address: str) -> bool:
        """Return whether the certificates have changed since the channel to `address`, which keeps them, was opened."""
        return address in self._channels and self._opened_with[address] != self._num_changes()

    def _num_changes(self) -> int:
        return 0 if self._tls is None else self._tls.num_changes()

    def take(self, address: str) -> grpc.aio.Channel | None:
        """Return the channel to `address`, which the caller must close; `get` opens another one."""
        return self._channels.pop(address, None)

    async def forget(self, address: str) -> None:
        """Close the channel to `address`, if there is one; its calls end with CANCELLED."""
        channel = self.take(address)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close all channels."""
        channels = (*self._channels.values(), *self._given.values())
        self._channels, self._given = {}, {}
        await asyncio.gather(*(channel.close() for channel in channels))
