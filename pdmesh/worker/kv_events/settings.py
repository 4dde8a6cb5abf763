"""Settings of KV events, and the optional libraries that a publisher over ZMQ needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import import_module

from pdmesh.runtime.config import ConfigError

EXTRA = "pip install 'pdmesh[kv-events]'"
MAX_BUFFER = 1_000_000
MAX_TOPIC_BYTES = 256
_ENDPOINT = re.compile(r"tcp://(?:[^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\*|[0-9]{1,5})|ipc://\S+")
_ENDPOINT_HELP = (
    "ZMQ endpoint to publish KV events at in vLLM's format, with the token ids of prompts: tcp://*:5557 listens, tcp://HOST:5557 "
    "connects; empty: none"
)
_REPLAY_HELP = "ZMQ endpoint that repeats KV events, such as tcp://*:5558; empty: none"
_ENCODING_HELP = "how each KV event over ZMQ is encoded: map (as vLLM from 0.24 on) or array (as vLLM before)"


@dataclass(frozen=True, kw_only=True)
class KVEventSettings:
    """Configure KV events: `kv_events` for subscribers over gRPC, `kv_events_endpoint` for those over ZMQ."""

    kv_events: bool = field(
        default=False, metadata={"help": "keep the token ids of cached blocks, for subscribers of routers to KV events"}
    )
    kv_events_endpoint: str = field(default="", metadata={"help": _ENDPOINT_HELP})
    kv_events_topic: str = field(default="", metadata={"help": "ZMQ topic of KV events"})
    kv_events_replay_endpoint: str = field(default="", metadata={"help": _REPLAY_HELP})
    kv_events_buffer: int = field(default=10_000, metadata={"help": "batches of KV events that can be repeated"})
    kv_events_encoding: str = field(default="map", metadata={"help": _ENCODING_HELP, "choices": ("map", "array")})

    @property
    def is_wanted(self) -> bool:
        """Return whether blocks are to be kept with their token ids."""
        return self.kv_events or bool(self.kv_events_endpoint)

    def validate(self) -> None:
        """Check all settings. Raises ValueError that names the field."""
        endpoint, replay = self.kv_events_endpoint, self.kv_events_replay_endpoint
        _check_endpoint("kv_events_endpoint", endpoint)
        _check_endpoint("kv_events_replay_endpoint", replay)
        if replay and not endpoint:
            raise ValueError("kv_events_replay_endpoint: nothing is published that it could repeat; give kv_events_endpoint, too")
        if replay and not binds(replay):
            raise ValueError("kv_events_replay_endpoint: it has to listen; give such as tcp://*:5558 or ipc:///run/replay")
        if replay == endpoint and replay and not replay.endswith(":*"):
            raise ValueError("kv_events_replay_endpoint: the same as kv_events_endpoint; give another port")
        if len(self.kv_events_topic.encode()) > MAX_TOPIC_BYTES:
            raise ValueError(f"kv_events_topic: more than {MAX_TOPIC_BYTES} bytes; give a shorter one")
        if not 1 <= self.kv_events_buffer <= MAX_BUFFER:
            raise ValueError(f"kv_events_buffer: {self.kv_events_buffer} is not 1 to {MAX_BUFFER}")


def binds(endpoint: str) -> bool:
    """Return whether an endpoint is listened at, by vLLM's rule: wildcards and ipc; the others are connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "tcp://0.0.0.0:"))


def require_libraries(settings: KVEventSettings) -> None:
    """Raise ConfigError, naming the extra to install, where a publisher is wanted and a library of it is missing."""
    if not settings.kv_events_endpoint:
        return
    for name in ("zmq", "msgspec"):
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError("--kv-events-endpoint", f"publishing needs the package {name}: {error}", EXTRA) from error


def _check_endpoint(name: str, endpoint: str) -> None:
    if not endpoint:
        return
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or ((found["port"] or "*") != "*" and int(found["port"]) > 65535):
        raise ValueError(f"{name}: {endpoint[:80]!r} is not tcp://HOST:PORT or ipc://PATH; give such as tcp://*:5557")
