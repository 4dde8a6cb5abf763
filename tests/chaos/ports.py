"""TCP ports of this machine, as the kernel tells them (Linux)."""

import random
import socket
from collections.abc import Sequence
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"
# 127.0.0.1, also as gRPC has it: mapped into IPv6.
_LOCALHOST = ("0100007F", "0000000000000000FFFF00000100007F")
# Below the range that connections take their own ports from: a worker that is down must find its port free when it comes back.
_FIRST, _LAST = 18_000, 32_000


def listening_ports() -> set[int]:
    """Those on which somebody listens at 127.0.0.1. Two small files of the kernel's, well under a millisecond."""
    return {port for table in _TABLES for port in _listening(table.read_text(encoding="ascii"))}


def _listening(table: str) -> set[int]:
    rows = (line.split(maxsplit=4)[1:4] for line in table.splitlines()[1:])
    return {int(local[-4:], 16) for local, _, state in rows if state == _LISTENING and local[:-5] in _LOCALHOST}


def free_ports(hosts: Sequence[str], count: int) -> list[int]:
    """`count` ports that nobody has at any of `hosts`. Raises RuntimeError when they cannot be found."""
    candidates = random.SystemRandom().sample(range(_FIRST, _LAST), 50 * count)
    found = [port for port in candidates if all(_is_free(host, port) for host in hosts)][:count]
    if len(found) < count:
        raise RuntimeError(f"no {count} ports are free between {_FIRST} and {_LAST}")
    return found


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
