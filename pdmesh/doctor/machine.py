"""Checks of the machine: compiler, processor, memory, shared memory, loopback, port, open files, GPU."""

from __future__ import annotations

import array
import mmap
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from pdmesh.platform import linux
from pdmesh.platform.capabilities import (
    ABSTRACT_SOCKETS,
    CAPABILITIES,
    CPU_TIERS,
    MEMFD,
    PEER_CREDENTIALS,
    VARIABLE,
    Capability,
)
from pdmesh.platform.capabilities import lacking as lacks
from pdmesh.platform.fallbacks import MEMINFO, cores_to_share, free_bytes, processor_features, quota_cores, text
from pdmesh.terminal import size

# Checks of a machine for a mesh: each is a function that returns a `Check`; none raises or makes lasting changes.


class State(Enum):
    """Name the outcome of a check. MISSING: something is not there; whether that stops the mesh is `Check.required`."""

    OK = "OK"
    WARN = "WARN"
    MISSING = "MISSING"


@dataclass(frozen=True)
class Check:
    """Hold one finding: its subject, what was found, the cost of what is missing, and the remedy."""

    name: str
    state: State
    found: str
    cost: str = ""
    remedy: str = ""
    required: bool = False  # no mesh runs on this machine without it

    @property
    def blocks(self) -> bool:
        """Return whether the mesh cannot run because of this finding."""
        return self.required and self.state is State.MISSING


def ok(name: str, found: str) -> Check:
    """Return a check that found everything it needs."""
    return Check(name, State.OK, found)


def warn(name: str, found: str, cost: str, remedy: str) -> Check:
    """Return a check that found a problem that makes the mesh worse."""
    return Check(name, State.WARN, found, cost, remedy)


def missing(name: str, found: str, cost: str, remedy: str, *, required: bool = False) -> Check:
    """Return a check that did not find what it needs."""
    return Check(name, State.MISSING, found, cost, remedy, required)


def examine(checks: Iterable[tuple[str, Callable[[], Check]]]) -> list[Check]:
    """Run checks in order. A check that fails unexpectedly is a finding itself, and the others still run."""
    return [_examined(name, check) for name, check in checks]


def _examined(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  # a failing check must not end the others; the finding names the error
        return warn(
            name, f"could not be checked: {type(error).__name__}: {error}", "it is not known whether this works", "report this"
        )


_COMPILERS = ("cc", "gcc", "clang")
# Instructions for matrix products and quantized weights, slowest last.
_CPU_FEATURES = (
    *("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "fma", "f16c"),
    *("sve", "bf16", "i8mm", "asimddp", "asimd"),
)
_LOW_MEMORY_BYTES = 3_000_000_000
_LEAST_MEMORY_BYTES = 1_200_000_000
_LEAST_OPEN_FILES = 1024


def compiler() -> Check:
    """Check for a C compiler, which packages without a wheel and native code need."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return ok("compiler", f"{path}: {_first_line([path, '--version'])}")
    cost = "packages without a ready-made wheel cannot be built"
    return missing("compiler", f"none of {', '.join(_COMPILERS)} on PATH", cost, "install gcc or clang (Debian: apt install gcc)")


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip().partition("\n")[0]


def cores() -> Check:
    """Check the cores that this process may use."""
    usable, whole, quota = len(cores_to_share()), os.cpu_count() or 1, quota_cores()
    found = f"{usable} usable of {whole}{'' if quota is None else f', a quota of {quota}'}, {platform.machine()}"
    if usable >= 2:
        return ok("cores", found)
    return warn("cores", found, "prefill and decode take turns on one core: separation gains nothing", "give it two or more")


def cpu_features() -> Check:
    """Check the instructions that decide the speed of a CPU engine, and name the tier of kernels that is taken for them."""
    from pdmesh.engine.kernels.cpu import isa

    name = "cpu features"
    present = processor_features()
    if not present:
        return warn(name, "the system does not tell them", "kernels run in portable code", "use Linux or macOS for speed")
    best, refused = isa.supported()[0].name, [tier.name for tier in isa.refused()]
    listed = ", ".join(feature for feature in _CPU_FEATURES if feature in present) or "none that matters"
    shown = f"{listed}; kernels: {_taken_tier(best)}"
    if refused:
        found = f"{shown}; the processor has {', '.join(refused)}, which the system does not permit"
        remedy = "use Linux 5.16 or later, and a container or sandbox that permits arch_prctl"
        return warn(name, found, "prefill is slower than this processor allows", remedy)
    if best != "portable":
        return ok(name, shown)
    if CPU_TIERS.is_taken:
        return warn(name, shown, "generation is several times slower", f"leave {CPU_TIERS.name} out of {VARIABLE}")
    remedy = "use a processor with AVX2 (2013 or later) or ARM's dot product (2018 or later)"
    return warn(name, shown, "generation is several times slower", remedy)


def _taken_tier(best: str) -> str:
    """Return the tier that runs; a variable that names none that can is a finding of its own (`software.cpu_kernels`)."""
    from pdmesh.engine.kernels.cpu import isa

    try:
        taken = isa.detect().name
    except ValueError:
        return f"none, as {isa.VARIABLE} names one that does not run here"
    return taken if taken == best else f"{taken}, which {isa.VARIABLE} names, in place of {best}"


def memory() -> Check:
    """Check the memory that is free for weights and KV, within the limit of this container."""
    free, is_told = free_bytes(), text(MEMINFO) is not None
    found = f"{size(free)} free" if is_told else f"{size(free)}; the system does not tell how much of it is free"
    remedy = "stop other programs, or give the machine or container more memory"
    if free < _LEAST_MEMORY_BYTES:
        return missing("memory", found, "two workers with the default model do not fit", remedy, required=True)
    if free < _LOW_MEMORY_BYTES:
        return warn("memory", found, "room for few concurrent requests with the default model", remedy)
    return ok("memory", found)


def shared_memory() -> Check:
    """Check the shm transport: anonymous shared memory whose descriptor travels over an abstract Unix socket, mapped
    read-only."""
    cost = "workers on this machine exchange KV over tcp, at a fraction of the speed"
    remedy = "use Linux 5.1 or later, and allow memfd_create and Unix sockets"
    for capability in (MEMFD, ABSTRACT_SOCKETS, PEER_CREDENTIALS):
        if problem := capability.problem:
            return warn("shared memory", f"lacks {capability.name}: {problem}", cost, remedy)
    try:
        _pass_memory_between_sockets()
    except (OSError, ValueError) as error:
        return warn("shared memory", f"does not work: {error}", cost, remedy)
    return ok("shared memory", "memfd over an abstract socket works")


def capabilities() -> list[tuple[str, Callable[[], Check]]]:
    """Return checks of what not every system can do: one that names what is there, and one for each that is lacking."""
    lacking = {capability.name for capability in lacks()}
    there = [capability.name for capability in CAPABILITIES if capability.name not in lacking]
    found = ok("capabilities", ", ".join(there) or "none")
    return [
        ("capabilities", lambda: found),
        *((f"no {each.name}", partial(_lacks, each)) for each in CAPABILITIES if each.name in lacking),
    ]


def _lacks(capability: Capability) -> Check:
    """Return the finding on a capability that is lacking: what is lost. The fallback is chosen without being told."""
    remedy = f"leave it out of {VARIABLE}" if capability.is_taken else "nothing: another way is taken, by itself"
    return warn(f"no {capability.name}", f"{capability.what}: {capability.problem}", capability.lost, remedy)


def _pass_memory_between_sockets() -> None:
    """Do what the shm transport does. Raises OSError or ValueError when a part of it fails."""
    sent = b"pdmesh doctor"
    name = f"\0pdmesh-doctor-{os.getpid()}"
    memory_fd = linux.memfd("pdmesh-doctor", 0)
    try:
        os.write(memory_fd, sent)
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sender:
            listener.bind(name)
            listener.listen(1)
            sender.connect(name)
            receiver, _ = listener.accept()
            with receiver:
                sender.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory_fd]))])
                if _read_received(receiver, len(sent)) != sent:
                    raise ValueError("the memory that arrived is not the one that was sent")
    finally:
        os.close(memory_fd)


def _read_received(receiver: socket.socket, num_bytes: int) -> bytes:
    _, fds, _, _ = socket.recv_fds(receiver, 1, 1)
    try:
        with mmap.mmap(fds[0], num_bytes, prot=mmap.PROT_READ) as mapped:
            return mapped[:]
    finally:
        for fd in fds:
            os.close(fd)


def loopback() -> Check:
    """Check a TCP connection within this machine: without it the processes cannot communicate."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=2):
            return ok("loopback", "127.0.0.1 connects")
    except OSError as error:
        cost = "the processes of the mesh cannot talk to each other"
        return missing("loopback", f"127.0.0.1: {error}", cost, "bring up the lo interface", required=True)


def port(number: int, flag: str = "--port") -> Check:
    """Check a port that `pdmesh up` takes; `flag` sets another one."""
    name = f"port {number}"
    try:
        with socket.create_server(("127.0.0.1", number)):
            return ok(name, "free")
    except OSError as error:
        cost = "`pdmesh up` cannot start there, unless a mesh runs already"
        return warn(name, f"taken ({error.strerror})", cost, f"pdmesh up {flag} 0")


def open_files() -> Check:
    """Check the limit on file descriptors: each stream and connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {hard})"
    if soft >= _LEAST_OPEN_FILES:
        return ok("open files", found)
    return warn("open files", found, "many concurrent clients are refused", f"ulimit -n {_LEAST_OPEN_FILES}")


def gpu() -> Check:
    """Check for an NVIDIA GPU with its driver. torch is imported only if there is one, because the import takes seconds."""
    cost = "engines run on the CPU: fine for small models, an order of magnitude slower for large ones"
    if not Path("/proc/driver/nvidia/version").exists() and shutil.which("nvidia-smi") is None:
        return missing("gpu", "no NVIDIA driver", cost, "nothing to do, if the CPU is meant to serve")
    import torch

    if not torch.cuda.is_available():
        return warn("gpu", f"there is a driver, but torch {torch.__version__} cannot use it", cost, "install torch with CUDA")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ok("gpu", ", ".join(names))
