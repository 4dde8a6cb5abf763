"""Calls that only Linux has. Elsewhere each raises OSError (ENOSYS); `capabilities` says which of them work."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Collection
from pathlib import Path

from pdmesh.platform import parent_death_program

# linux/mman.h, which Python does not name: the first two touch pages and change nothing in them.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python's fcntl module names it only from 3.13 on
_PR_GET_PDEATHSIG = 2  # linux/prctl.h
_REQUEST_STATE, _TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM of asm/prctl.h, and the number of the tiles' state
_ARCH_PRCTL = 158  # the number of the system call on x86-64
_UCRED = struct.Struct("iII")  # pid, uid, gid
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the numbers of the system call
_SCHED_ATTR = struct.Struct("IIQiIQQQII")  # size, policy, flags, nice, priority, runtime, deadline, period, 2 of utilization

CLOSE_RECEIVED_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""A flag of `socket.recv_fds`; 0 where it does not exist: `os.set_inheritable` then does the same a moment later."""


RESERVE_NOTHING = _MAP_NORESERVE if sys.platform == "linux" else 0
"""A flag of `mmap.mmap`: addresses are reserved, and no memory counts as promised."""


def memfd(name: str, num_bytes: int) -> int:
    """Return the descriptor of `num_bytes` zero bytes of memory without a file, which can be sealed. `name` is shown by /proc."""
    if sys.platform != "linux":
        raise _absent("memfd_create")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> None:
    """Let nobody shrink, grow or newly map for writing the memory of `memfd`; mappings that exist stay writable."""
    if sys.platform != "linux":
        raise _absent("F_ADD_SEALS")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def cannot_shrink(fd: int) -> bool:
    """Return whether memory is sealed against shrinking. Raises OSError for what is no memfd."""
    if sys.platform != "linux":
        raise _absent("F_GET_SEALS")
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def peer_uid(sock: socket.socket) -> int:
    """Return the user whose process is at the other end of a connected Unix socket."""
    if sys.platform != "linux":
        raise _absent("SO_PEERCRED")
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def set_parent_death_signal() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform != "linux":
        raise _absent("PR_SET_PDEATHSIG")
    parent_death_program.set_parent_death_signal(signal.SIGKILL)


def parent_death_signal() -> int:
    """Return the signal that this process gets when its parent ends; 0: none."""
    if sys.platform != "linux":
        raise _absent("PR_GET_PDEATHSIG")
    number = ctypes.c_int()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) != 0:
        raise _failed("prctl(PR_GET_PDEATHSIG)")
    return number.value


def touch_pages(start: int, end: int) -> None:
    """Allocate the pages of the addresses [start, end) now. `start` is at the beginning of a page."""
    if sys.platform != "linux":
        raise _absent("MADV_POPULATE_WRITE")
    _advise(start, end - start, _MADV_POPULATE_WRITE, "MADV_POPULATE_WRITE")


def read_pages(start: int, num_bytes: int) -> None:
    """Read the pages of a mapped file into memory now. `start` is at the beginning of a page."""
    if sys.platform != "linux":
        raise _absent("MADV_POPULATE_READ")
    _advise(start, num_bytes, _MADV_POPULATE_READ, "MADV_POPULATE_READ")


def use_huge_pages(memory: mmap.mmap) -> None:
    """Allow the kernel to lay private memory into huge pages."""
    if sys.platform != "linux":
        raise _absent("MADV_HUGEPAGE")
    memory.madvise(mmap.MADV_HUGEPAGE)


def use_huge_file_pages(start: int, num_bytes: int) -> None:
    """Allow the kernel to read a mapped file into huge pages. `start` is at the beginning of a page."""
    if sys.platform != "linux":
        raise _absent("MADV_HUGEPAGE")
    _advise(start, num_bytes, mmap.MADV_HUGEPAGE, "MADV_HUGEPAGE")


def collapse_pages(start: int, num_bytes: int) -> None:
    """Move the pages of these addresses into huge pages now. `start` is at the beginning of a huge page."""
    if sys.platform != "linux":
        raise _absent("MADV_COLLAPSE")
    _advise(start, num_bytes, _MADV_COLLAPSE, "MADV_COLLAPSE")


def forget_pages(start: int, num_bytes: int) -> None:
    """Give the pages of these addresses back. Private memory reads as zeros from then on; a mapped file as the file, whose pages
    the system may forget. `start` is at the beginning of a page."""
    if sys.platform != "linux":
        raise _absent("MADV_DONTNEED")
    _advise(start, num_bytes, mmap.MADV_DONTNEED, "MADV_DONTNEED")


def own_memory() -> list[tuple[int, int]]:
    """Return the addresses [start, end) that are writable memory of this process alone, of no file. Raises OSError."""
    if sys.platform != "linux":
        raise _absent("/proc/self/maps")
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, access, _offset, _device, inode = line.split(maxsplit=5)[:5]
        if access.startswith("rw") and access.endswith("p") and inode == "0":
            start, end = (int(each, 16) for each in addresses.split("-"))
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, end))
    return found


def map_file_at(address: int, num_bytes: int, fd: int, *, writable: bool = False) -> None:
    """Map the beginning of a file at `address`, in place of what is mapped there: memory of the caller's own."""
    if sys.platform != "linux":
        raise _absent("MAP_FIXED")
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if call(address, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        raise _failed("mmap(MAP_FIXED)")


def request_matrix_tiles() -> None:
    """Have the kernel let this process use the matrix tiles of x86-64 (AMX), which it does not until it is asked. It refuses
    before Linux 5.16, for a processor without them, and in some sandboxes."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise _absent("ARCH_REQ_XCOMP_PERM")
    if ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) != 0:
        raise _failed("arch_prctl(ARCH_REQ_XCOMP_PERM)")


def allowed_cores(thread_id: int = 0) -> set[int]:
    """Return the numbers of the cores on which a thread may run; 0: the present one. A process's id is its main thread's."""
    if sys.platform != "linux":
        raise _absent("sched_getaffinity")
    return os.sched_getaffinity(thread_id)


def bind_thread(cores: Collection[int]) -> None:
    """Let this thread run on these cores alone."""
    if sys.platform != "linux":
        raise _absent("sched_setaffinity")
    os.sched_setaffinity(0, cores)


def set_time_slice(slice_s: float) -> None:
    """Have this thread, and those that it starts from now on, run for `slice_s` seconds at a time where threads compete; 0: as
    long as the system likes. Since Linux 6.12 a thread with a shorter slice gets a core when it wakes from one with a longer
    slice; over time both get as much as before. Earlier ones take the call and change nothing."""
    number = _SCHED_SETATTR.get(os.uname().machine) if sys.platform == "linux" else None
    if sys.platform != "linux" or number is None:
        raise _absent("sched_setattr")
    policy = os.sched_getscheduler(0)
    if policy != os.SCHED_OTHER:
        raise OSError(errno.EINVAL, f"scheduling policy {policy} has no slices")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, policy, 0, nice, 0, round(slice_s * 1e9), 0, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0) != 0:
        raise _failed("sched_setattr")


def time_slice() -> float:
    """Return this thread's slice, in seconds; 0 on Linux before 6.12."""
    number = _SCHED_SETATTR.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        raise _absent("sched_getattr")
    attributes = ctypes.create_string_buffer(_SCHED_ATTR.size)
    if ctypes.CDLL(None, use_errno=True).syscall(number + 1, 0, attributes, _SCHED_ATTR.size, 0) != 0:
        raise _failed("sched_getattr")
    return float(_SCHED_ATTR.unpack(attributes.raw)[5]) / 1e9


def set_user_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Have the kernel end a TCP connection whose peer has confirmed nothing for so long; accepted sockets inherit it."""
    if sys.platform != "linux":
        raise _absent("TCP_USER_TIMEOUT")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


def _advise(start: int, num_bytes: int, advice: int, name: str) -> None:
    # ctypes releases the GIL for the call.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice) != 0:
        raise _failed(f"madvise({name})")


def _absent(call: str) -> OSError:
    return OSError(errno.ENOSYS, f"{call}: {os.strerror(errno.ENOSYS)}")


def _failed(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
