"""Addresses "host:port", the only place that writes and reads them: an IPv6 host stands in brackets, "[::1]:8100".

A host alone, as in `--host`, may have brackets or not; sockets want none.
"""

from __future__ import annotations

MAX_PORT = 65535
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def bare_host(host: str) -> str:
    """Return the host as sockets take it, without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_address(host: str, port: int | str) -> str:
    """Return "host:port", an IPv6 host in brackets. `host` may have them already."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return ("host", port) of "host:port" or "[host]:port". Raises ValueError naming what is wrong."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"the address must be host:port, got {address!r}")
    if ":" in host and bare_host(host) == host:
        raise ValueError(f"an IPv6 host stands in brackets, as in [::1]:{port}, got {address!r}")
    return bare_host(host), int(port)


def canonical(address: str) -> str:
    """Return HOST:PORT with 127.0.0.1 for localhost, as the processes of a local mesh name themselves; as it is, if it is no
    such address."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host == "localhost" else address


def reachable_host(host: str) -> str:
    """Return the host at which this machine reaches a server that listens on `host`, which may stand for all addresses."""
    host = bare_host(host)
    return _LOOPBACKS.get(host, host)
