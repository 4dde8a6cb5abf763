"""Listening ports that several processes share: the kernel assigns each new connection to one of them (SO_REUSEPORT).

The process that starts the others keeps a socket that is bound but never listens: it gets no connections, yet the port stays
taken while its processes come and go, and another mesh's router cannot slip in between them unseen.
"""

from __future__ import annotations

import os
import socket

from pdmesh.platform.capabilities import SHARED_PORTS
from pdmesh.runtime.addresses import bare_host
from pdmesh.runtime.config import ConfigError


def can_share() -> bool:
    """Return whether this system distributes connections over all processes that share a port."""
    return SHARED_PORTS.is_there


def reserve(host: str, port: int, setting: str) -> socket.socket:
    """Return a bound socket that holds "host:port" for processes that share it; port 0: any free one. Close it at the end. Raises
    ConfigError, naming `setting`, when the port is taken, also by a process that would share it."""
    try:
        if port:
            _bound(host, port, shared=False).close()
        return _bound(host, port, shared=True)
    except OSError as error:
        problem = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise ConfigError(setting, problem, f"choose another {setting}, or 0 for any free one") from None


def share(listening: socket.socket) -> None:
    """Allow other sockets with the same option to bind the same port; call it before binding."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        if shared:
            share(made)
        if os.name == "posix":  # connections of an ended process that remain in the kernel do not block the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        if shared and os.name == "posix":  # from here on a foreign process with the same option could bind the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        made.close()
        raise
    return made
