"""Who takes part in `make bench-clients`, with the versions that were tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.clients.smg import smg_gateway
from benchmarks.peers.catalogue import Environment

# From the router's address to the one that the client is given, for as long as the gateway runs.
Gateway = Callable[[str], AbstractContextManager[str]]


@dataclass(frozen=True)
class ClientUnderTest:
    """One client. `environment` None: this very Python. `gateway`: what stands between it and the mesh."""

    name: str
    module: str
    environment: Environment | None = None
    gateway: Gateway = contextlib.nullcontext


TRITON = Environment("tritonclient", (("install", "tritonclient[grpc]==2.73.0"),))
REFERENCE = ClientUnderTest("pdmesh's client", "benchmarks.clients.child_pdmesh")
CLIENTS = (
    REFERENCE,
    ClientUnderTest("tritonclient 2.73.0", "benchmarks.clients.child_tritonclient", TRITON),
    ClientUnderTest("HTTP through SMG 1.13.0", "benchmarks.clients.child_http", gateway=smg_gateway),
)
