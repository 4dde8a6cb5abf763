"""Hosts of their own: what is cut does not arrive, everything else does, and all of it is gone afterwards."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

from tests.chaos.hosts import Hosts, MemoryGroup, can_have_namespaces, in_namespace

LISTEN = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 7000))
while True:
    print(server.recvfrom(100)[0].decode(), flush=True)
"""
SAY = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
"""
WAITS_S, MOMENT_S = 15.0, 0.3
PAIRS = ("ab", "ba", "ac", "ca", "bc", "cb")


class Listening:
    """Three hosts; each writes down what it hears."""

    def __init__(self, folder: Path) -> None:
        self.hosts = Hosts(("a", "b", "c"))
        self._files = {name: folder / name for name in self.hosts.address_of}
        self._number = 0
        self._listeners: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self.hosts.start()
            for name, address in self.hosts.address_of.items():
                with self._files[name].open("wb") as file:
                    listen = [*self.hosts.enter(name), sys.executable, "-c", LISTEN, address]
                    self._listeners.append(subprocess.Popen(listen, stdout=file))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.kill()
            listener.wait()
        asyncio.run(self.hosts.close())

    def heard(self, expected: set[str]) -> set[str]:
        """Have each host send to each other one; return the pairs, source first, whose packet came: at once where those that are
        expected are there, and a moment for others."""
        self._number += 1
        for pair in PAIRS:
            target, text = self.hosts.address_of[pair[1]], f"{pair} {self._number}"
            say = [*self.hosts.enter(pair[0]), sys.executable, "-c", SAY, target, text]
            subprocess.run(say, check=False, stderr=subprocess.DEVNULL)
        ends_at = time.monotonic() + WAITS_S
        while not self._found() >= expected and time.monotonic() < ends_at:
            time.sleep(0.05)
        time.sleep(MOMENT_S)
        return self._found()

    def _found(self) -> set[str]:
        lines = [line.split() for file in self._files.values() for line in file.read_text().splitlines()]
        return {pair for pair, number in lines if int(number) == self._number}


def check(folder: Path) -> None:
    """Runs in a namespace of its own."""
    with Listening(folder) as listening:
        hosts = listening.hosts
        whole = set(PAIRS)
        assert any(listening.heard(whole) == whole for _ in range(3)), "at first"
        hosts.cut("a", "b")
        hosts.cut("a", "b")
        assert listening.heard(whole - {"ab"}) == whole - {"ab"}
        hosts.heal("a", "b")
        assert listening.heard(whole - {"ab"}) == whole - {"ab"}, "one of two cuts is left"
        hosts.heal("a", "b")
        assert listening.heard(whole) == whole
        hosts.unplug("c")
        assert listening.heard({"ab", "ba"}) == {"ab", "ba"}
        hosts.plug("c")
        assert listening.heard(whole) == whole


@pytest.mark.skipif(not can_have_namespaces(), reason="needs network namespaces, and ip, unshare, nsenter and setpriv")
def test_what_is_cut_does_not_arrive_and_the_rest_does(tmp_path: Path) -> None:
    command = in_namespace([sys.executable, "-m", __name__, str(tmp_path)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
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
    check(Path(sys.argv[1]))
