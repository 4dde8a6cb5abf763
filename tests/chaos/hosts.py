"""Hosts on one machine: each process in a network namespace of its own, all of them on one bridge; and control groups of memory.

The process that runs this is in a namespace of its own as well (`in_namespace`), where it may do as it likes: nothing of the
machine's own network is touched. A host is held by a process that ends with us, and is gone with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pdmesh.launcher.plan import ProcessPlan

_PREFIX = "10.77.0"
_HUB = f"{_PREFIX}.1"
_BRIDGE = "bridge"
_NOWHERE = "02:00:00:00:00:00"
"""A hardware address that no host has: what is sent to it does not arrive, and the sender is not told."""
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
GROUPS = Path("/sys/fs/cgroup")
GROUP_BYTES = 16 << 10


def in_namespace(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in a new network namespace; without root in one of users, too."""
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *users, "--net", "--", *command]


def can_have_namespaces() -> bool:
    """Return whether this machine has the programs, and lets us make bridges and pairs of interfaces."""
    if not all(shutil.which(program) for program in ("unshare", "nsenter", "setpriv", "ip")):
        return False
    probes = (["type", "bridge"], ["type", "veth", "peer", "name", "peer"])
    commands = [in_namespace(["ip", "link", "add", "probe", *probe]) for probe in probes]
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Hosts:
    """One host for each name, with an address of its own. Use it in a namespace of its own; `close` ends what it started."""

    def __init__(self, names: Sequence[str]) -> None:
        self.address_of = {name: f"{_PREFIX}.{number}" for number, name in enumerate(names, start=10)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._num_cuts: Counter[tuple[str, str]] = Counter()
        self._forwarder: asyncio.Server | None = None

    def start(self) -> None:
        """Make the bridge and the hosts. Raises CalledProcessError."""
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{_HUB}/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for number, (name, address) in enumerate(self.address_of.items()):
            holder = subprocess.Popen([*_ENDS_WITH_US, "unshare", "--net", "--", "sleep", "infinity"])
            self._holders[name] = holder
            self._until_apart(holder.pid)
            _run("ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
            _run("ip", "link", "set", f"port{number}", "master", _BRIDGE, "up")
            self._within(name, "ip", "link", "set", "lo", "up")
            self._within(name, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            self._within(name, "ip", "link", "set", "eth0", "up")

    async def forward(self, port: int) -> str:
        """Have all hosts reach 127.0.0.1:`port` of this namespace, at the same port; return the address for them."""

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
            writer.close()

        self._forwarder = await asyncio.start_server(accepted, _HUB, port)
        return f"{_HUB}:{port}"

    def on_host(self, plan: ProcessPlan) -> ProcessPlan:
        """The plan as it runs on the host of its name, where it listens at the host's address."""
        argv = list(plan.argv)
        argv[argv.index("--host") + 1] = self.address_of[plan.name]
        return replace(plan, argv=(*self.enter(plan.name), *argv))

    def unplug(self, name: str) -> None:
        """Let nothing pass to or from a host, of any connection."""
        _run("ip", "link", "set", self._port(name), "nomaster")

    def plug(self, name: str) -> None:
        """Take `unplug` back."""
        _run("ip", "link", "set", self._port(name), "master", _BRIDGE)

    def cut(self, source: str, target: str) -> None:
        """Let nothing that `source` sends reach `target`. Cuts of one pair add up."""
        self._num_cuts[source, target] += 1
        address = self.address_of[target]
        self._within(source, "ip", "neigh", "replace", address, "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")

    def heal(self, source: str, target: str) -> None:
        """Take one `cut` back."""
        self._num_cuts[source, target] -= 1
        if not self._num_cuts[source, target]:
            self._within(source, "ip", "neigh", "del", self.address_of[target], "dev", "eth0")

    async def close(self) -> None:
        """End the forwarder and the hosts; idempotent. Namespaces end with their processes."""
        if self._forwarder is not None:
            self._forwarder.close()
        while self._holders:
            _, holder = self._holders.popitem()
            holder.kill()
            holder.wait()

    def enter(self, name: str) -> tuple[str, ...]:
        """Return what a command line begins with that runs on a host."""
        return ("nsenter", "--target", str(self._holders[name].pid), "--net", "--")

    def _port(self, name: str) -> str:
        return f"port{list(self.address_of).index(name)}"

    def _within(self, name: str, *command: str) -> None:
        _run(*self.enter(name), *command)

    @staticmethod
    def _until_apart(pid: int) -> None:
        """Wait until the process has a namespace of its own."""
        ours = Path("/proc/self/ns/net").readlink()
        for _ in range(500):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/ns/net").readlink() != ours:
                    return
            time.sleep(0.01)
        raise RuntimeError("a process did not get a network namespace of its own within 5 s")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


class MemoryGroup:
    """A control group with room for next to nothing: what its processes had before does not count. Version 1 or 2."""

    def __init__(self) -> None:
        """Make it. Raises OSError where that is not allowed."""
        parent = GROUPS / "memory" if (GROUPS / "memory").is_dir() else GROUPS
        self._parent, self._folder = parent, parent / f"pdmesh-chaos-{uuid.uuid4().hex[:8]}"
        self._former = parent
        self._folder.mkdir()
        limit = "memory.limit_in_bytes" if parent != GROUPS else "memory.max"
        try:
            (self._folder / limit).write_text(str(GROUP_BYTES))
        except OSError:
            self._folder.rmdir()
            raise

    def take(self, pid: int) -> None:
        """Move a process into it."""
        self._former = self._group_of(pid)
        (self._folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Move what lives back to where it was, and end the group. Raises OSError where it does not end within a second."""
        for tries_left in reversed(range(100)):
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._former / "cgroup.procs").write_text(pid)
            try:
                self._folder.rmdir()
                break
            except OSError:  # what the kernel kills takes a moment to leave
                if not tries_left:
                    raise
                time.sleep(0.01)

    def _group_of(self, pid: int) -> Path:
        """Return the group that a process is in."""
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == ("memory" if self._parent != GROUPS else ""):
                return self._parent / path.lstrip("/")
        return self._parent

    @classmethod
    def is_allowed(cls) -> bool:
        """Return whether there are such groups here, for us."""
        try:
            cls().close()
        except OSError:
            return False
        return True
