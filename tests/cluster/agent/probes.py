"""Probes as the kubelet asks them: from the node, at the pod's address; commands inside the container."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cluster.agent.api import Object

GRPC_ANNOTATION = "test.pdmesh/grpc-probes"
"""JSON {container: {probe: {"grpc": …}}}: an API server of 1.20 knows no gRPC probes; the overlay keeps them here."""
KINDS = ("startupProbe", "readinessProbe", "livenessProbe")
Execute = Callable[[list[str]], Awaitable[int]]


@dataclass(frozen=True)
class Probe:
    """One probe of one container."""

    spec: Object
    container: Object
    address: str
    execute: Execute  # runs a command in the container; its exit code

    @property
    def period_s(self) -> float:
        """Between two."""
        return float(self.spec.get("periodSeconds", 10))

    @property
    def initial_delay_s(self) -> float:
        """Before the first."""
        return float(self.spec.get("initialDelaySeconds", 0))

    @property
    def failure_threshold(self) -> int:
        """So many in a row count."""
        return int(self.spec.get("failureThreshold", 3))

    async def passes(self) -> bool:
        """Asks once, within its time-out."""
        with contextlib.suppress(OSError, TimeoutError, httpx.HTTPError, grpc.RpcError):
            async with asyncio.timeout(float(self.spec.get("timeoutSeconds", 1))):
                return await self._ask()
        return False

    async def _ask(self) -> bool:
        match self.spec:
            case {"grpc": spec}:
                return await _serving(f"{self.address}:{spec['port']}", spec.get("service") or "")
            case {"httpGet": spec}:
                scheme = spec.get("scheme", "HTTP").lower()
                return await _answers(f"{scheme}://{self.address}:{self._port(spec['port'])}{spec.get('path', '/')}")
            case {"tcpSocket": spec}:
                _, writer = await asyncio.open_connection(self.address, self._port(spec["port"]))
                writer.close()
                return True
            case {"exec": spec}:
                return await self.execute(spec["command"]) == 0
        raise ValueError(f"a probe with {', '.join(self.spec)} is not known")

    def _port(self, port: int | str) -> int:
        named = {entry.get("name"): entry["containerPort"] for entry in self.container.get("ports") or ()}
        return int(named.get(port, port))


async def _serving(target: str, service: str) -> bool:
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _answers(url: str) -> bool:
    # As the kubelet: certificates are not verified.
    async with httpx.AsyncClient(verify=False) as client:
        return (await client.get(url)).status_code < 400


def probes_of(pod: Object, container: Object, address: str, execute: Execute) -> dict[str, Probe]:
    """By kind, those that the API server does not know among them."""
    kept = json.loads((pod["metadata"].get("annotations") or {}).get(GRPC_ANNOTATION, "{}"))
    specs = {kind: container[kind] for kind in KINDS if kind in container} | kept.get(container["name"], {})
    return {kind: Probe(spec, container, address, execute) for kind, spec in specs.items()}
