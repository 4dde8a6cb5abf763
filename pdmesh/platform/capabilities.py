"""What this system can do that not every system can. Each capability is found by trying it, never by the system's name.

    if capabilities.MEMFD.is_there: ...        else the fallback, beside each use

PDMESH_WITHOUT takes capabilities away, so that the fallbacks run on a machine that has everything: PDMESH_WITHOUT=memfd,affinity,
or `all`. The processes of a mesh inherit it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdmesh.platform import linux, processor

VARIABLE = "PDMESH_WITHOUT"
ALL = "all"
_HUGE_PAGE_BYTES = 2 << 20
_NUM_CONNECTIONS = 24  # all of them at one of two listeners that share a port: once in eight million tries


@dataclass(frozen=True)
class Capability:
    """Describe a capability: what it is, and what is lost without it, for `pdmesh doctor`."""

    name: str  # in PDMESH_WITHOUT
    what: str
    lost: str
    _try: Callable[[], None]  # raises OSError or AttributeError

    @property
    def is_there(self) -> bool:
        """Return whether it works here, and is not taken away. Raises ValueError as `taken_away` does."""
        return not self.problem

    @property
    def problem(self) -> str:
        """Return why it is not there; empty if it is. Raises ValueError as `taken_away` does."""
        return f"taken away by {VARIABLE}" if self.is_taken else _tried(self)

    @property
    def is_taken(self) -> bool:
        """Return whether PDMESH_WITHOUT takes it away, be it there or not. Raises ValueError as `taken_away` does."""
        return self.name in taken_away()


@functools.cache
def _tried(capability: Capability) -> str:
    try:
        capability._try()
    except (OSError, AttributeError) as error:
        return str(error) or type(error).__name__
    return ""


def taken_away() -> frozenset[str]:
    """Return the names in PDMESH_WITHOUT. Raises ValueError that begins with the variable and names each word that is none."""
    return _parsed(os.environ.get(VARIABLE, ""))


@functools.cache
def _parsed(value: str) -> frozenset[str]:
    words = {word.strip() for word in value.split(",")} - {""}
    known = {capability.name for capability in CAPABILITIES}
    if unknown := sorted(words - known - {ALL}):
        listed = ", ".join(repr(word[:40]) for word in unknown)
        raise ValueError(f"{VARIABLE}: {listed} is no capability; give some of {', '.join(sorted(known))}, or {ALL}")
    return frozenset(known if ALL in words else words)


def lacking() -> tuple[Capability, ...]:
    """Return the capabilities that are not there. Raises ValueError as `taken_away` does."""
    return tuple(capability for capability in CAPABILITIES if not capability.is_there)


# How each is tried.


def _try_memfd() -> None:
    fd = linux.memfd("pdmesh-probe", mmap.PAGESIZE)
    try:
        with mmap.mmap(fd, mmap.PAGESIZE) as ours:
            linux.seal(fd)
            ours[:1] = b"x"
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            return
        raise OSError(errno.ENOTSUP, "a sealed memfd can be shrunk")
    finally:
        os.close(fd)


def _try_abstract_sockets() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0pdmesh-probe-" + secrets.token_hex(8))


def _try_peer_credentials() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if linux.peer_uid(ours) != os.geteuid():
            raise OSError(errno.ENOTSUP, "SO_PEERCRED names another user than ours for our own socket")


def _try_parent_death() -> None:
    linux.parent_death_signal()


def _try_huge_pages() -> None:
    if "[never]" in _content("/sys/kernel/mm/transparent_hugepage/enabled"):
        raise OSError(errno.ENOTSUP, "transparent huge pages are switched off (/sys/kernel/mm/transparent_hugepage/enabled)")
    with mmap.mmap(-1, _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        linux.use_huge_pages(memory)


def _try_touched_pages() -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux: there the number of the advice may mean something else
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        page = ctypes.c_char.from_buffer(memory)
        try:
            linux.touch_pages(ctypes.addressof(page), ctypes.addressof(page) + mmap.PAGESIZE)
        finally:
            del page


def _try_affinity() -> None:
    linux.bind_thread(linux.allowed_cores())


def _try_thread_priority() -> None:
    # A thread has a priority of its own where its id is one of the kernel's tasks.
    if not Path(f"/proc/self/task/{threading.get_native_id()}").is_dir():
        raise OSError(errno.ENOTSUP, "threads are no tasks of the kernel")


def _try_time_slices() -> None:
    before = linux.time_slice()
    linux.set_time_slice(before)
    if not before:
        raise OSError(errno.ENOTSUP, "threads have no slices of their own before Linux 6.12")


def _try_proc() -> None:
    if "MemAvailable" not in _content("/proc/meminfo"):
        raise OSError(errno.ENOENT, "no MemAvailable in /proc/meminfo")


def _try_cgroups() -> None:
    if not any(Path("/sys/fs/cgroup", name).exists() for name in ("cgroup.controllers", "memory.stat", "memory", "cpu")):
        raise OSError(errno.ENOENT, "nothing in /sys/fs/cgroup")


def _try_shared_ports() -> None:
    """Connect to two listeners on one port: both must get connections."""
    with socket.socket() as first, socket.socket() as second, selectors.DefaultSelector() as waiting:
        for listener, address in ((first, ("127.0.0.1", 0)), (second, None)):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address or first.getsockname())
            listener.listen(_NUM_CONNECTIONS)
            waiting.register(listener, selectors.EVENT_READ)
        made = [socket.create_connection(first.getsockname(), timeout=2) for _ in range(_NUM_CONNECTIONS)]
        try:
            if len(waiting.select(1)) < 2:
                raise OSError(errno.ENOTSUP, "of two listeners on one port, one gets all connections")
        finally:
            for each in made:
                each.close()


def _try_user_timeout() -> None:
    with socket.socket() as sock:
        linux.set_user_timeout(sock, 1.0)


def _try_cpu_tiers() -> None:
    machine = platform.machine()
    least = processor.LEAST.get(machine)
    # /proc/cpuinfo, where it is, has the last word, as it has for the kernels.
    cpuinfo = _content("/proc/cpuinfo")
    if least is None or not least <= (processor.listed(cpuinfo) if cpuinfo else processor.asked()):
        raise OSError(errno.ENOTSUP, f"the kernels have no tier of instructions for this processor ({machine})")


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


MEMFD = Capability(
    "memfd",
    "memory without a file that can be sealed against its peers",
    "KV between workers of this machine goes over sockets (tcp) instead of shared memory, which is slower; the ranks of a worker "
    "on the CPU share an unlinked temporary file, which the system may write to disk; the table of lent cores is a file beside "
    "the logs",
    _try_memfd,
)
ABSTRACT_SOCKETS = Capability(
    "abstract_sockets",
    "Unix sockets with a name that is no file",
    "KV between workers of this machine goes over sockets (tcp) instead of shared memory, and of GPUs over host memory: slower",
    _try_abstract_sockets,
)
PEER_CREDENTIALS = Capability(
    "peer_credentials",
    "the kernel's word on whose process is at the other end of a Unix socket",
    "no memory is shown to other workers: KV goes over sockets (tcp), where the reservation's token tells peers apart; slower",
    _try_peer_credentials,
)
PARENT_DEATH = Capability(
    "parent_death",
    "the kernel ends a process with its parent",
    "each process of a mesh, and each rank of a worker, has a small process beside it that ends it with its parent",
    _try_parent_death,
)
HUGE_PAGES = Capability(
    "huge_pages",
    "private memory in huge pages",
    "attention over long contexts is slower (more misses of the TLB), and so are products with weights, by 5 to 8 %",
    _try_huge_pages,
)
TOUCHED_PAGES = Capability(
    "touched_pages",
    "pages of memory are allocated ahead of their use",
    "steps and hand-offs that use a KV block for the first time wait for its memory",
    _try_touched_pages,
)
AFFINITY = Capability(
    "affinity",
    "threads are bound to cores",
    "--cpus is refused, and all cores of the machine count as ours, also where this process may not use some",
    _try_affinity,
)
THREAD_PRIORITY = Capability(
    "thread_priority", "a priority for each thread", "work on KV tiers competes with the engine's steps", _try_thread_priority
)
TIME_SLICES = Capability(
    "time_slices",
    "a time slice for each thread",
    "what answers requests waits milliseconds for a core where all of them compute",
    _try_time_slices,
)
PROC = Capability(
    "proc",
    "free memory, processor and network namespace in /proc",
    "all physical memory counts as free (give --kv-memory-mb where other programs need some); the processor's features are "
    "unknown; each worker has a copy of packed weights in huge pages, in place of sharing them",
    _try_proc,
)
CGROUPS = Capability(
    "cgroups",
    "a container's limits in /sys/fs/cgroup",
    "a container's limits on memory and processor time are not seen; outside of containers nothing is lost",
    _try_cgroups,
)
SHARED_PORTS = Capability(
    "shared_ports",
    "the kernel spreads connections over processes that listen on one port",
    "a router runs in one process: --processes above 1 is refused",
    _try_shared_ports,
)
USER_TIMEOUT = Capability(
    "user_timeout",
    "the kernel ends connections whose peer reads nothing",
    "a client of the HTTP API that does not read its answer to the end holds its connection as long as it likes",
    _try_user_timeout,
)
CPU_TIERS = Capability(
    "cpu_tiers",
    "CPU kernels for this processor's instructions",
    "the CPU kernels run in portable code, several times slower than with AVX2 or ARM's dot product",
    _try_cpu_tiers,
)

CAPABILITIES = (
    *(MEMFD, ABSTRACT_SOCKETS, PEER_CREDENTIALS, PARENT_DEATH, HUGE_PAGES, TOUCHED_PAGES, AFFINITY, THREAD_PRIORITY),
    *(TIME_SLICES, PROC, CGROUPS, SHARED_PORTS, USER_TIMEOUT, CPU_TIERS),
)
