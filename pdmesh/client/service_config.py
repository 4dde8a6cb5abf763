"""How a gRPC library of any language balances, retries and times out calls of `pdmesh.v1.Mesh`: `service_config.json` here.

    channel = grpc.aio.insecure_channel("ipv4:10.0.0.1:8100,10.0.0.2:8100", options=service_config.channel_options())

- **Balancing**: in turn over all routers that a name (`dns:///…`) or a list (`ipv4:…`) stands for, but for those whose health for
  the Mesh service is not SERVING: one that drains, or that reaches no decode worker.
- **Retries** end with the first message, as gRPC's always do: from then on the client has the seed and continues with `resume`.
  Before it a try has given out nothing, so another changes nothing. Generate and Chat are tried again when a router is gone and
  when it refuses for lack of room (gRPC waits as long as the refusal says); the unary calls, which are never refused so, when it
  is gone.
- **Timeouts** for the unary calls only. An answer takes as long as it takes: give it a deadline that means something to you.
- **Throttling**: with half of 100 tokens gone (a failure costs one, ten successes give one back) nothing is tried again.

The client library of `pdmesh` does not use it: it looks for a router for longer, resumes streams, and asks routers that are not
ready for their status.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).with_name("service_config.json")


def text() -> str:
    """The service config as JSON."""
    return PATH.read_text(encoding="utf-8")


def channel_options() -> tuple[tuple[str, str | int], ...]:
    """Options for any channel of grpcio: the service config, and reconnects as fast as routers restart."""
    return (
        ("grpc.service_config", text()),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    )
