"""Processes of a mesh that are forked from one that has imported torch and other packages for all of them: each begins two
seconds of computing sooner.

with ForkServers() as servers, servers.used():
    async with LocalMesh(...): ...

What is forked is a process as any other: its own session, pipes, signals, environment, and a child of this process, which reads
its exit code. Modules of this repository are not imported before the fork, so what they read as they are imported they read for
themselves. Processes come from two servers in turn: as in separate interpreters, `hash()` of a text in the one is not that in the
other. A command that is not of MODULES, or has folders of its own on its path, is started as ever, and so is all where the system
is not Linux.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any, NoReturn, Self

import pytest

from pdmesh.platform import parent_death
from pdmesh.runtime.child import import_path, python_command

RANK = "pdmesh.engine.parallel.rank"
MODULES = {"pdmesh.worker", "prefill_service", "decode_service", "router"}
PACKAGES = (
    *("torch", "numpy", "numpy.typing", "safetensors.torch", "crc32c", "tokenizers", "llguidance", "redis.asyncio"),
    *("grpc", "grpc.aio", "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "google.protobuf.json_format"),
    *("google.rpc.status_pb2", "jinja2.ext", "jinja2.meta", "jinja2.sandbox", "pydantic.main", "pydantic.type_adapter"),
    *("starlette.applications", "starlette.middleware.cors", "uvicorn", "uvicorn.protocols.http.h11_impl", "prometheus_client"),
    *("opentelemetry.sdk.trace.export", "opentelemetry.sdk.metrics"),
)
_MAX_BYTES = 1 << 20
_REPARENT_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36


class ForkServers:
    """The servers, from `with` to its end. A process that still runs then goes on."""

    def __init__(self, num_servers: int = 2) -> None:
        self._num_servers = num_servers
        self._servers: list[_Server] = []
        self._turn: Iterator[_Server] = iter(())

    def __enter__(self) -> Self:
        if sys.platform == "linux":
            self._servers = [_Server() for _ in range(self._num_servers)]
        self._turn = cycle(self._servers)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()

    @contextmanager
    def used(self) -> Iterator[None]:
        """What asyncio starts of MODULES is forked within the block."""
        with pytest.MonkeyPatch.context() as patch:
            if self._servers:
                patch.setattr(asyncio.unix_events, "subprocess", _Subprocess(self._start))
            yield

    @contextmanager
    def used_for_ranks(self) -> Iterator[None]:
        """Ranks of an engine in this process are forked within the block."""
        from pdmesh.engine.parallel import tp_group  # a server imports none of the engine

        with pytest.MonkeyPatch.context() as patch:
            if self._servers:
                patch.setattr(tp_group, "subprocess", _Subprocess(self._start_rank))
            yield

    def _start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        module = _module_of(argv)
        if module not in MODULES or not _same_modules(options["env"] or os.environ):
            return subprocess.Popen(argv, **options)
        del options["pass_fds"]  # a forked process looks for its parent itself
        return next(self._turn).fork_piped(argv, module, **options)

    def _start_rank(
        self, argv: Sequence[str], *, stdin: int, stdout: int, pass_fds: Sequence[int], env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        assert (stdin, stdout) == (subprocess.DEVNULL, subprocess.DEVNULL)
        assert _same_modules(env), env["PYTHONPATH"]
        pid = next(self._turn).fork(argv, RANK, env, {number: number for number in pass_fds}, session=False)
        return _popen(argv, pid)


def _same_modules(env: Mapping[str, str]) -> bool:
    """Whether a process with this environment finds what a server has found: a folder before ours may have a sitecustomize."""
    root = import_path()["PYTHONPATH"].split(os.pathsep)
    return {*env.get("PYTHONPATH", "").split(os.pathsep)} <= {*root, ""}


def _module_of(argv: Sequence[str]) -> str:
    """The M of `python -P -m M`, behind what ties it to its parent; empty for other commands."""
    tied = list(parent_death.tied(python_command("-m")).argv)
    return argv[len(tied)] if list(argv[: len(tied)]) == tied and len(argv) > len(tied) else ""


class _Subprocess:
    """The module `subprocess` as asyncio sees it."""

    def __init__(self, start: Callable[..., subprocess.Popen[bytes]]) -> None:
        self.Popen = start

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


class _Server:
    """A process that forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = python_command("-m", "tests.support.forked_processes", str(theirs.fileno()))
        env = {**os.environ, **import_path(), "OPENBLAS_NUM_THREADS": "1"}  # threads do not survive a fork
        with theirs:
            self._process = subprocess.Popen(command, env=env, pass_fds=(theirs.fileno(),), start_new_session=True)

    def fork_piped(
        self, argv: Sequence[str], module: str, *, stdin: int, stdout: int, stderr: int, env: Any, cwd: Any, **options: Any
    ) -> subprocess.Popen[bytes]:
        """A child of this process that runs the module, as asyncio starts it."""
        if (stdin, stdout, stderr, cwd) != (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE, None):
            return subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd, **options)
        assert options.pop("start_new_session"), options
        ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
        try:
            pid = self.fork(argv, module, env, dict(enumerate(theirs, 1)), session=True)
        finally:
            for fd in theirs:
                os.close(fd)
        return _popen(argv, pid, *(os.fdopen(fd, "rb") for fd in ours))

    def fork(self, argv: Sequence[str], module: str, env: Mapping[str, str], fds: Mapping[int, int], *, session: bool) -> int:
        """Return the process id. `fds`: ours by the numbers that the child has for them."""
        arguments = list(argv[list(argv).index(module) + 1 :])
        asked = {"module": module, "arguments": arguments, "env": dict(env), "numbers": [*fds], "session": session}
        asked |= {"parent": os.getpid(), "cwd": os.getcwd()}
        with self._lock:  # ranks are started by threads
            _adopt(True)
            try:
                socket.send_fds(self._socket, [json.dumps(asked).encode()], [*fds.values()])
                return int(self._socket.recv(64))
            finally:
                _adopt(False)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _popen(argv: Sequence[str], pid: int, stdout: Any = None, stderr: Any = None) -> subprocess.Popen[bytes]:
    """As if it had been started by `subprocess.Popen`."""
    popen = subprocess.Popen.__new__(subprocess.Popen)
    state = {"args": list(argv), "pid": pid, "returncode": None, "stdin": None, "stdout": stdout, "stderr": stderr}
    vars(popen).update(state, _child_created=True, _waitpid_lock=threading.Lock(), _communication_started=False)
    return popen


def _adopt(whether: bool) -> None:
    """Whether a process below this one whose parent ends becomes this one's child."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


# In the server


def serve(asking: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each message; return in each with what was asked for, and in the server at the end with None."""
    while True:
        message, fds, _, _ = socket.recv_fds(asking, _MAX_BYTES, 2)
        if not message:
            return None
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                for fd in (asking.detach(), reading, writing):
                    os.close(fd)
                return _become(json.loads(message), fds)
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from now on it is the child of the process that asked
        asking.send(os.read(reading, 64))
        for fd in (reading, writing, *fds):
            os.close(fd)


def _become(asked: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
    if asked["session"]:
        os.setsid()
    os.chdir(asked["cwd"])
    with open(os.devnull, "r+b") as devnull:
        for number in (0, 1):
            os.dup2(devnull.fileno(), number)
    _number(fds, asked["numbers"])
    os.environ.clear()
    os.environ.update(asked["env"])
    deadline = time.monotonic() + _REPARENT_S
    while os.getppid() != asked["parent"] and time.monotonic() < deadline:
        time.sleep(0.001)
    parent_death.exit_with_parent(asked["parent"])
    return asked


def _number(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors their numbers, by way of others: one may have the number that another is to get."""
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 + max(*numbers, *fds)) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(spare, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def main(fd: str) -> NoReturn:
    """Import, fork, and in what was forked run the module, with this interpreter's own end behind it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in PACKAGES:
        with suppress(ModuleNotFoundError):  # the process itself says what it lacks
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    asked = serve(socket.socket(fileno=int(fd)))
    if asked is None:
        sys.exit()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = asked["arguments"]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(sys.argv[1])
