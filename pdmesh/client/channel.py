"""Addresses and connection settings that both clients share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc.experimental import ChannelOptions

from pdmesh.runtime.rpc.tls import Tls

DEFAULT_ADDRESS = "127.0.0.1:8100"
_TARGET = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")  # gRPC's names of other kinds of addresses

# While a call runs, a router that sends nothing is asked for a sign of life after keepalive_time and has ping_timeout to give it:
# one that stands still is left after the sum. gRPC's own threads answer, so one that is only slow is not left. keepalive_timeout
# says the same and is not enough: grpcio 1.85 goes by ping_timeout, a minute by default. A restarted router is reconnected within
# max_reconnect_backoff. min_reconnect_backoff is gRPC's name for its connection timeout.
RECONNECT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 400),
    ("grpc.keepalive_timeout_ms", 800),
    ("grpc.http2.ping_timeout_ms", 800),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *RECONNECT_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    # A connection for each client: closing one does not affect another's.
    ("grpc.use_local_subchannel_pool", 1),
)


# The thread that iterates reads the stream. Otherwise gRPC starts a thread for the calls of a channel that had none, and each
# message passes through it: a fifth of a millisecond before a call is sent, and another wake-up before a token is seen.
SYNC_CHANNEL_OPTIONS = (*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1))


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    """Return a channel to a router; encrypted, and the router verified, if `tls` is given."""
    if tls is None:
        return grpc.insecure_channel(address, SYNC_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, tls.channel_credentials(), (*SYNC_CHANNEL_OPTIONS, *tls.channel_options))


def open_aio_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """Return a channel for asyncio; see `open_channel`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), (*CHANNEL_OPTIONS, *tls.channel_options))


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the routers to use, in order. A string may hold several, separated by commas. Raises ValueError when there is
    none."""
    names = given.split(",") if isinstance(given, str) else list(given)
    found = tuple(name.strip() for name in names if name.strip())
    if not found:
        raise ValueError("routers: name at least one address, such as 127.0.0.1:8100")
    for address in found:
        if address.count(":") > 1 and "[" not in address and not _TARGET.match(address):
            raise ValueError(f"routers: an IPv6 host stands in brackets, as in [::1]:8100, got {address!r}")
    return found


def checked_key(api_key: str) -> str:
    """Return an API key that is valid in metadata. Raises ValueError, which does not show it."""
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ValueError("api_key: contains characters that no key has; give it as `pdmesh keys new` has shown it")
    return api_key


@dataclass
class Preference:
    """Hold the index of the router that answered last, or that follows one that was lost: it is tried first next time."""

    address: int = 0

    def lost(self, address: int, following: int) -> None:
        """Note that the router `address` is lost: other calls need not find that out for themselves."""
        if self.address == address:
            self.address = following
