"""A pod's network: a namespace with an address of its own on the node's bridge, held by a process that sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from pdmesh.platform import parent_death
from tests.cluster import network
from tests.cluster.namespaces import ip

_START_S = 10.0
_POLL_S = 0.01


class Sandbox:
    """`open` makes it, `close` ends whatever is in it."""

    def __init__(self, number: int) -> None:
        """`number` is nobody else's."""
        self.address = network.pod_address(number)
        self._cable = f"pod{number}"
        self._holder: asyncio.subprocess.Process | None = None
        self._inode = 0

    @property
    def pid(self) -> int:
        """In whose namespace the pod lives. Raises RuntimeError before `open`."""
        if self._holder is None:
            raise RuntimeError("not open")
        return self._holder.pid

    async def open(self) -> None:
        """Raises RuntimeError when the system makes no network."""
        command = parent_death.tied(["unshare", "--net", "sleep", "infinity"]).argv
        self._holder = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        await self._wait_for_namespace(self._holder)
        await asyncio.to_thread(self._plug, self._holder.pid)

    async def close(self) -> None:
        """Ends every process in the namespace, which goes with the last one. Idempotent."""
        if self._holder is None:
            return
        for pid in _members(self._inode):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._holder.pid, signal.SIGKILL)
        await self._holder.wait()
        self._holder = None

    async def _wait_for_namespace(self, holder: asyncio.subprocess.Process) -> None:
        own = os.stat("/proc/self/ns/net").st_ino
        async with asyncio.timeout(_START_S):
            while True:
                if holder.returncode is not None:
                    raise RuntimeError(f"unshare ended with {holder.returncode}")
                with contextlib.suppress(OSError):
                    if (inode := os.stat(f"/proc/{holder.pid}/ns/net").st_ino) != own:
                        self._inode = inode
                        return
                await asyncio.sleep(_POLL_S)

    def _plug(self, pid: int) -> None:
        ip(f"link add {self._cable} type veth peer name eth0 netns {pid}", f"link set {self._cable} master {network.BRIDGE} up")
        ip(
            "link set lo up",
            f"addr add {self.address}/{network.PREFIX_LENGTH} dev eth0",
            "link set eth0 up",
            f"route add default via {network.GATEWAY}",
            network_of=pid,
        )


def _members(inode: int) -> list[int]:
    """Processes of a network namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and inode and os.stat(entry / "ns/net").st_ino == inode:
                found.append(int(entry.name))
    return found
