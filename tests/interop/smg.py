"""The SMG gateway in front of a router, taking the mesh for one vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import free_ports, say
from benchmarks.peers.environments import Environment, child_environment, ensure_environment
from benchmarks.peers.servers import Server, served
from tests.interop.site import Site

# smg-grpc-proto describes the protocol: tests compare it with ours.
SMG = Environment("smg", (("install", "smg==1.13.0", "smg-grpc-proto==0.4.28"),))
_READY_TIMEOUT_S = 60.0


@contextmanager
def smg_gateway(site: Site) -> Iterator[str]:
    """Runs the gateway, until it knows the worker's model and has its tokenizer; yields its "host:port". PeerError says why it
    does not become ready."""
    python = ensure_environment(SMG, say)
    port, metrics_port = free_ports(2)
    argv = (
        *(str(python), "-m", "smg", "launch", "--worker-urls", f"grpc://{site.router}"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
    )
    # Offline it does not ask a model hub for the tokenizer first, but the router.
    server = Server("smg", argv, f"http://127.0.0.1:{port}/readiness", child_environment())
    with served([server], _READY_TIMEOUT_S):
        yield f"127.0.0.1:{port}"
