"""Which incarnation of a process this is, and which host it runs on."""

from __future__ import annotations

import os
import secrets
import socket
from functools import cache
from pathlib import Path


def new_epoch() -> int:
    """64 random bits, never zero (on the wire zero means "any"). Drawn once at the start of a worker; compared for equality
    only."""
    return secrets.randbits(64) or 1


@cache
def host_id() -> str:
    """Equal for two processes iff they share a running kernel and a network namespace, so that an abstract Unix socket joins
    them."""
    return f"{_boot_id()}:{_network_namespace()}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # no Linux: the host's name is the best there is
        return socket.gethostname()


def _network_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net").removeprefix("net:").strip("[]")
    except OSError:
        return "0"
