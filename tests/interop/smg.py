"""The SMG gateway in front of a router, taking the mesh for one vLLM engine."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import say
from benchmarks.peers.environments import Environment, PeerError, child_environment, ensure_environment, last_line, peers_folder
from tests.interop.site import Site

# smg-grpc-proto describes the protocol: tests compare it with ours.
SMG = Environment("smg", (("install", "smg==1.13.0", "smg-grpc-proto==0.4.28"),))
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0


@contextmanager
def smg_gateway(site: Site) -> Iterator[str]:
    """Runs the gateway; yields its "host:port". PeerError says why it does not become ready."""
    python = ensure_environment(SMG, say)
    port, metrics_port = _free_ports(2)
    log = peers_folder() / "logs" / "smg.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(str(python), "-m", "smg", "launch", "--worker-urls", f"grpc://{site.router}"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
    ]
    with log.open("wb") as output:
        # Offline it does not ask a model hub for the tokenizer first, but the router.
        process = subprocess.Popen(command, stdout=output, stderr=output, env=child_environment())
    try:
        _wait_ready(f"http://127.0.0.1:{port}/readiness", process)
        yield f"127.0.0.1:{port}"
    except TimeoutError as error:
        raise PeerError(f"SMG: {error}: {last_line(log)}") from error
    finally:
        _stop(process)


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """It answers 200 once it knows the worker's model and has its tokenizer."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TimeoutError(f"ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"was not ready within {_READY_TIMEOUT_S:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
