"""Hosts of their own: what is cut does not arrive, everything else does, and all of it is gone afterwards."""

import asyncio
import subprocess
import sys

import pytest

from tests.chaos.hosts import Hosts, MemoryGroup, can_have_namespaces, in_namespace

ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 7000))
while True:
    server.sendto(*server.recvfrom(100))
"""
ASK = """
import socket, sys
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(float(sys.argv[2]))
client.sendto(b"?", (sys.argv[1], 7000))
client.recvfrom(100)
"""


def answers(hosts: Hosts, pair: str, timeout_s: float) -> bool:
    """Whether a packet goes from the first host to the second, and back."""
    source, target = pair[0], pair[1]
    ask = (sys.executable, "-c", ASK, hosts.address_of[target], str(timeout_s))
    return subprocess.run([*hosts.enter(source), *ask], capture_output=True, check=False).returncode == 0


def check() -> None:
    """Runs in a namespace of its own."""
    hosts = Hosts(("a", "b", "c"))
    hosts.start()
    echoes = []
    try:
        for name, address in hosts.address_of.items():
            echoes.append(subprocess.Popen([*hosts.enter(name), sys.executable, "-c", ECHO, address]))
        for pair in ("ab", "bc", "ca"):
            assert any(answers(hosts, pair, 1.0) for _ in range(20)), f"{pair} at first"
        hosts.cut("a", "b")
        _expect(hosts, cut=("ab", "ba"), whole=("ac", "bc"))
        hosts.heal("a", "b")
        hosts.unplug("c")
        _expect(hosts, cut=("ac", "cb"), whole=("ab", "ba"))
        hosts.plug("c")
        _expect(hosts, cut=(), whole=("ac", "cb", "ab"))
    finally:
        for echo in echoes:
            echo.kill()
            echo.wait()
        asyncio.run(hosts.close())


def _expect(hosts: Hosts, *, cut: tuple[str, ...], whole: tuple[str, ...]) -> None:
    wrong = [pair for pair in cut if answers(hosts, pair, 0.5)] + [pair for pair in whole if not answers(hosts, pair, 10.0)]
    assert not wrong, f"{wrong} of {cut} cut and {whole} whole"


@pytest.mark.skipif(not can_have_namespaces(), reason="needs network namespaces, and ip, unshare and nsenter")
def test_what_is_cut_does_not_arrive_and_the_rest_does() -> None:
    done = subprocess.run(
        in_namespace([sys.executable, "-m", __name__]), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not MemoryGroup.is_allowed(), reason="needs control groups of memory that we may make")
def test_a_process_without_memory_is_killed_by_the_kernel() -> None:
    eats = "import time\nkept = []\nwhile True:\n    kept.append(bytes(range(256)) * 4096)\n    time.sleep(0.01)"
    eater = subprocess.Popen([sys.executable, "-c", eats])
    group = MemoryGroup()
    try:
        group.take(eater.pid)
        assert eater.wait(timeout=30) == -9
    finally:
        eater.kill()
        group.close()


if __name__ == "__main__":
    check()
