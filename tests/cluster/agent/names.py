"""The cluster's DNS: A records of Services. A headless one has its ready pods' addresses, any other its own."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import Callable
from typing import cast

from tests.cluster import network
from tests.cluster.agent.api import Key, Object

PORT = 53
TTL_S = 1
_ANSWER, _NO_SUCH_NAME, _REFUSED = 0x8400, 0x8403, 0x8405
_A, _IN = 1, 1

Lookup = Callable[[], tuple[dict[Key, Object], dict[Key, Object]]]


class NameServer(asyncio.DatagramProtocol):
    """Answers over UDP; asks `lookup` for Services and Endpoints at each question."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """asyncio's. What is no question stays without answer."""
        if self._transport is not None and len(data) > 12 and not data[2] & 0x80:
            self._transport.sendto(answer(data, *self._lookup()), addr)


def answer(question: bytes, services: dict[Key, Object], endpoints: dict[Key, Object]) -> bytes:
    """The message that answers one (RFC 1035, section 4): one question, addresses of version 4."""
    identity = struct.unpack(">H", question[:2])[0]
    name, end = _name(question, 12)
    kind = struct.unpack(">H", question[end : end + 2])[0]
    found = addresses(name, services, endpoints)
    flags = _NO_SUCH_NAME if found is None else _ANSWER
    records = [ipaddress.IPv4Address(address).packed for address in found or ()] if kind == _A else []
    head = struct.pack(">HHHHHH", identity, flags | (question[2] & 1) << 8, 1, len(records), 0, 0)
    body = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", _A, _IN, TTL_S, 4) + record for record in records)
    return head + question[12 : end + 4] + body


def addresses(name: str, services: dict[Key, Object], endpoints: dict[Key, Object]) -> list[str] | None:
    """Of SERVICE.NAMESPACE.svc.DOMAIN; None for a name that is not there."""
    parts = name.lower().removesuffix(f".svc.{network.CLUSTER_DOMAIN}").split(".")
    if len(parts) != 2 or not name.lower().endswith(f".svc.{network.CLUSTER_DOMAIN}"):
        return None
    service = services.get((parts[1], parts[0]))
    if service is None:
        return None
    if (address := service["spec"].get("clusterIP")) not in (None, "", "None"):
        return [str(address)]
    subsets = endpoints.get((parts[1], parts[0]), {}).get("subsets") or ()
    return [entry["ip"] for subset in subsets for entry in subset.get("addresses") or ()]


def _name(message: bytes, start: int) -> tuple[str, int]:
    labels = []
    while (length := message[start]) != 0:
        labels.append(message[start + 1 : start + 1 + length].decode("ascii", errors="replace"))
        start += 1 + length
    return ".".join(labels), start + 1
