"""Linux namespaces by the system's own calls: what runs inside one is seen nowhere else, and goes with its last process.

Standard library only: the first program of each container (`agent/container.py`) imports this, and nothing else of ours.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
NEW_NAME = 0x04000000  # CLONE_NEWUTS
NEW_NETWORK = 0x40000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """This thread, and what it starts from now on, gets namespaces of its own. Raises OSError."""
    _check(_libc.unshare(kinds), "unshare")


def join_network(pid: int) -> None:
    """This thread goes into the network namespace of a process. Raises OSError."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(descriptor, NEW_NETWORK), "setns")
    finally:
        os.close(descriptor)


def private_mounts() -> None:
    """A mount namespace whose changes nobody outside sees."""
    unshare(NEW_MOUNTS)
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)


def mount(kind: str, target: str, options: str = "") -> None:
    """A new file system of a kind (tmpfs, overlay) at `target`. Raises OSError."""
    _mount(kind, target, kind, 0, options)


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """`target`, which is there, becomes `source`. Raises OSError."""
    _mount(source, target, None, _BIND | _RECURSIVE)
    if read_only:
        _mount("none", target, None, _REMOUNT | _BIND | _READ_ONLY)


def make_read_only(target: str) -> None:
    """A mounted file system lets nobody write any more."""
    _mount("none", target, None, _REMOUNT | _READ_ONLY)


def enter_private_network() -> None:
    """This process gets a network and mounts of its own, with nothing but loopback in them. Raises OSError; PermissionError says
    what to do.

    Call it before the process has threads: those that are there stay outside."""
    if os.geteuid() != 0:
        # A user namespace would give the network, but not a root file system for each container over this machine's.
        raise PermissionError("a network and mounts of one's own need root: run the tests of tests/cluster as root")
    private_mounts()
    unshare(NEW_NETWORK)
    ip("link set lo up")


def ip(*commands: str, network_of: int | None = None) -> None:
    """Commands of ip(8), in this network or in that of a process. Raises RuntimeError with what it said."""
    program = ["ip", "-batch", "-"]
    if network_of is not None:
        program = ["nsenter", f"--net=/proc/{network_of}/ns/net", *program]
    done = subprocess.run(program, input="\n".join(commands), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {'; '.join(commands)}: {done.stderr.strip()}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode() or None)
    _check(result, f"mount {source} at {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
