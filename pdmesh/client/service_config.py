"""The gRPC service config for `pdmesh.v1.Mesh`, for any language: balancing, retries and timeouts in `service_config.json`.

    channel = grpc.aio.insecure_channel("ipv4:10.0.0.1:8100,10.0.0.2:8100", options=service_config.channel_options())

- **Balancing**: round-robin over all routers of a name (`dns:///…`) or a list (`ipv4:…`), except those whose health for the
  Mesh service is not SERVING: one that drains, or that reaches no decode worker.
- **Retries** end with the first message, as gRPC's always do: from then on the client has the seed and continues with `resume`.
  Before it an attempt has returned nothing, so another changes nothing. Generate and Chat are retried when a router is lost and
  when it rejects them for lack of capacity (gRPC waits as long as the rejection says); the unary calls, which are never rejected
  so, when it is lost.
- **Timeouts** for the unary calls only. The time of an answer is open: set a deadline that suits the application.
- **Throttling**: with half of 100 tokens gone (a failure costs one, ten successes give one back) nothing is retried.

The client library of `pdmesh` does not use it: it looks for a router for longer, resumes streams, and asks routers that are not
ready for their status.
"""

from __future__ import annotations

from pathlib import Path

from pdmesh.client.channel import RECONNECT_OPTIONS

PATH = Path(__file__).with_name("service_config.json")


def text() -> str:
    """Return the service config as JSON."""
    return PATH.read_text(encoding="utf-8")


def channel_options() -> tuple[tuple[str, str | int], ...]:
    """Return options for any channel of grpcio: the service config, pings by which a router that stands still is noticed, and
    reconnects as fast as routers restart."""
    return (("grpc.service_config", text()), *RECONNECT_OPTIONS)
