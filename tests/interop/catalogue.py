"""Who takes part in `make bench-clients`, with the versions that were tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.peers.environments import Environment
from tests.interop.load.aiperf import AIPERF
from tests.interop.load.guidellm import GUIDELLM
from tests.interop.load.k6 import K6
from tests.interop.load.vllm_bench import VLLM_BENCH
from tests.interop.site import Site
from tests.interop.smg import smg_gateway

# From the mesh to the "host:port" that the client is given, for as long as what stands between them runs.
Gateway = Callable[[Site], AbstractContextManager[str]]


def over_grpc(site: Site) -> AbstractContextManager[str]:
    """The router itself."""
    return contextlib.nullcontext(site.router)


def over_http(site: Site) -> AbstractContextManager[str]:
    """The router's own gateway."""
    return contextlib.nullcontext(site.http.removeprefix("http://"))


@dataclass(frozen=True)
class ClientUnderTest:
    """One client. `environment` None: this very Python. `gateway`: what stands between it and the mesh."""

    name: str
    module: str
    environment: Environment | None = None
    gateway: Gateway = over_grpc


TRITON = Environment("tritonclient", (("install", "tritonclient[grpc]==2.73.0"),))
REFERENCE = ClientUnderTest("pdmesh's client", "tests.interop.child_pdmesh")
CLIENTS = (
    REFERENCE,
    ClientUnderTest("tritonclient 2.73.0", "tests.interop.child_tritonclient", TRITON),
    ClientUnderTest("HTTP through SMG 1.13.0", "tests.interop.child_http", gateway=smg_gateway),
    ClientUnderTest("HTTP", "tests.interop.child_http", gateway=over_http),
    ClientUnderTest(f"openai {version('openai')}", "tests.interop.child_openai", gateway=over_http),
)
GENERATORS = (AIPERF, GUIDELLM, K6, VLLM_BENCH)
