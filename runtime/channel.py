"""gRPC channels to other processes of the mesh. Needs grpcio only: the client library uses it too."""

from __future__ import annotations

import asyncio

import grpc.aio

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_TIME_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0

Option = tuple[str, int]


def connect(
    address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES, keepalive_time_s: float = KEEPALIVE_TIME_S
) -> grpc.aio.Channel:
    """A channel to "host:port". Connects at the first call and again, soon, whenever the connection is lost. Close it after use.

    No proxy (mesh traffic stays in its network); a connection of its own, so that closing the channel closes it."""
    options: list[Option] = [
        *message_size_options(max_message_bytes),
        ("grpc.keepalive_time_ms", round(keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # gRPC's own back-off reaches two minutes: far too long for a worker that restarts in seconds.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def message_size_options(max_message_bytes: int) -> list[Option]:
    """The options that bound messages in both directions, for channels and servers."""
    return [("grpc.max_send_message_length", max_message_bytes), ("grpc.max_receive_message_length", max_message_bytes)]


class Channels:
    """One channel for each address, opened when first asked for. On one event loop."""

    def __init__(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_message_bytes = max_message_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`; owned by this cache."""
        if address not in self._channels:
            self._channels[address] = connect(address, max_message_bytes=self._max_message_bytes)
        return self._channels[address]

    async def forget(self, address: str) -> None:
        """Closes the channel to `address`, if there is one; its calls end with CANCELLED."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all channels."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))
