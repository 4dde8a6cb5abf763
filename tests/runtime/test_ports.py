"""A port that is held for others: free again at once for who comes back, and closed to strangers."""

from __future__ import annotations

import socket

import pytest

from pdmesh.runtime import ports
from pdmesh.runtime.config import ConfigError

HOST = "127.0.0.1"


@pytest.fixture
def left() -> int:
    """A port nobody listens on any more; the kernel still remembers a connection that its server has closed first."""
    with socket.create_server((HOST, 0)) as listening:
        port = int(listening.getsockname()[1])
        with socket.create_connection((HOST, port)) as client:
            listening.accept()[0].close()
            assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError):
        strict.bind((HOST, port))
    return port


def bound(port: int, *options: int) -> socket.socket:
    made = socket.socket()
    for option in options:
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    made.bind((HOST, port))
    made.listen()
    return made


@pytest.mark.skipif(not ports.can_share(), reason="this system does not share ports")
def test_who_comes_back_has_the_port_at_once_and_a_stranger_does_not(left: int) -> None:
    with ports.reserve(HOST, left, "--port"):
        with pytest.raises(OSError):
            bound(left, socket.SO_REUSEADDR).close()
        with bound(left, socket.SO_REUSEPORT), bound(left, socket.SO_REUSEPORT, socket.SO_REUSEADDR):
            pass


def test_one_that_is_taken_is_named() -> None:
    with socket.create_server((HOST, 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: cannot listen on {HOST} port {port}: Address already in use"):
            ports.reserve(HOST, port, "--port")
