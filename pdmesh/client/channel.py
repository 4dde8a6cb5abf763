"""Addresses and connection settings that both clients share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc.experimental import ChannelOptions

from pdmesh.runtime.rpc.tls import Tls

DEFAULT_ADDRESS = "127.0.0.1:8100"

# A router that stops answering is noticed within keepalive_time + keepalive_timeout; one that comes back is reconnected to
# within max_reconnect_backoff. min_reconnect_backoff is gRPC's name for its connection timeout.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    # A connection of its own for each client: closing one does not touch another's.
    ("grpc.use_local_subchannel_pool", 1),
)


# Streams are read by the thread that iterates. Otherwise gRPC starts a thread for the calls of a channel that had none, and
# each message passes through it: a fifth of a millisecond before a call is sent, and another wake-up before a token is seen.
SYNC_CHANNEL_OPTIONS = (*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1))


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    """A channel to a router; encrypted, and the router checked, if `tls` is given."""
    if tls is None:
        return grpc.insecure_channel(address, SYNC_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, tls.channel_credentials(), (*SYNC_CHANNEL_OPTIONS, *tls.channel_options))


def open_aio_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """As `open_channel`, for asyncio."""
    if tls is None:
        return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), (*CHANNEL_OPTIONS, *tls.channel_options))


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """The routers to use, in order. A string may hold several, separated by commas. Raises ValueError when there is none."""
    names = given.split(",") if isinstance(given, str) else list(given)
    found = tuple(name.strip() for name in names if name.strip())
    if not found:
        raise ValueError("routers: name at least one address, such as 127.0.0.1:8100")
    return found


def checked_key(api_key: str) -> str:
    """An API key as it may stand in metadata. Raises ValueError, which does not show it."""
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ValueError("api_key: holds characters that no key has; give it as `pdmesh keys new` has shown it")
    return api_key


@dataclass
class Preference:
    """Index of the router that answered last: the first to be asked next."""

    address: int = 0
