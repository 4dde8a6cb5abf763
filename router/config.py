"""Configuration of a router process: flags, environment and `--help` come from this dataclass."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdmesh.runtime.rpc.mesh_secret import MeshSecretConfig
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.text.generation_config import GenerationConfig
from pdmesh.text.parsers.registry import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from router.engine_bridge.address import EngineAddress, parse_all
from router.routing.policy import POLICIES

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s]+):[0-9]{1,5}")
MAX_PROCESSES = 256
_AT_LEAST_ONE = (
    "max_inflight",
    "max_queued_bytes",
    "max_buffered_tokens",
    "max_prompt_bytes",
    "prefix_index_blocks",
    "http_max_body_bytes",
    "http_max_connections",
    "http_keep_responses_max",
    "http_keep_responses_bytes",
    "max_streams",
    "max_streams_per_connection",
    "processes",
    "sharers",
)
_POSITIVE = (
    "stream_timeout_s",
    "engine_timeout_s",
    "reattach_grace_s",
    "submit_timeout_s",
    "place_timeout_s",
    "paused_timeout_s",
    "resubmit_timeout_s",
    "room_timeout_s",
    "forget_worker_s",
    "hold_timeout_s",
)


@dataclass(frozen=True)
class BatchConfig:
    """Configure batch files. Without a folder there are none."""

    http_batch_folder: str = field(
        default="", metadata={"help": "folder of files and batches (/v1/files, /v1/batches); empty: there are no batches"}
    )
    http_batch_file_bytes: int = field(default=200 << 20, metadata={"help": "bytes of a file that clients upload for a batch"})
    http_batch_lines: int = field(default=50_000, metadata={"help": "lines of a batch"})
    http_batch_files: int = field(default=500, metadata={"help": "files that a tenant may have, those with results included"})
    http_batch_unfinished: int = field(default=100, metadata={"help": "batches of a tenant that have not ended"})
    http_batch_running: int = field(default=4, metadata={"help": "batches that this router works at the same time"})
    http_batch_concurrency: int = field(default=8, metadata={"help": "lines of a batch that run at the same time"})
    http_batch_retry_s: float = field(
        default=3600.0, metadata={"help": "how long a line is tried again while the mesh refuses it for overload"}
    )

    def validate(self) -> None:
        """Check all settings. Raises ValueError that names the field."""
        for name in ("file_bytes", "lines", "files", "unfinished", "running", "concurrency"):
            if getattr(self, f"http_batch_{name}") < 1:
                raise ValueError(f"http_batch_{name}: must be at least 1")
        if not self.http_batch_retry_s >= 0:
            raise ValueError("http_batch_retry_s: must not be negative")


@dataclass(frozen=True)
class RouterConfig:
    """Configure a router. Durations are seconds of the monotonic clock unless the name says `_ms`."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=50051, metadata={"help": "port to listen on; 0 picks a free one"})
    http_port: int | None = field(
        default=None, metadata={"help": "port of the OpenAI-compatible API over HTTP; 0 picks a free one, empty: no HTTP"}
    )
    http_host: str = field(default="", metadata={"help": "address to listen on for HTTP; empty: --host"})
    api_keys: str = field(
        default="",
        metadata={
            "help": "file with API keys (see pdmesh keys), or the URL of a Redis that holds them; empty: no keys are required",
            "secret": True,
        },
    )
    http_max_body_bytes: int = field(default=4 << 20, metadata={"help": "bytes of an HTTP request"})
    http_max_connections: int = field(default=1024, metadata={"help": "open HTTP connections; more are refused"})
    http_cors_origin: tuple[str, ...] = field(
        default=(),
        metadata={"help": "origins whose web pages may call the HTTP API, such as https://chat.example, comma separated; *: any"},
    )
    http_keep_responses_s: int = field(
        default=0,
        metadata={
            "help": "how long answers of /v1/responses are kept in --redis for the next turn (previous_response_id); 0: not"
        },
    )
    http_keep_responses_max: int = field(
        default=1000, metadata={"help": "responses of each tenant that are kept; more drop the oldest"}
    )
    http_keep_responses_bytes: int = field(
        default=64 << 20, metadata={"help": "bytes of all kept responses of each tenant; more drop the oldest"}
    )
    batches: BatchConfig = field(default_factory=BatchConfig, metadata={"flatten": True})
    models: tuple[str, ...] = field(
        default=(), metadata={"help": "models to serve, NAME=FOLDER with the tokenizer, comma separated"}
    )
    generation_config: GenerationConfig = field(
        default="auto",
        metadata={
            "help": "defaults of temperature, top_p and other sampling parameters: auto takes those of the model's "
            "generation_config.json, none ignores them"
        },
    )
    tool_parser: tuple[str, ...] = field(
        default=("auto",),
        metadata={
            "help": "format in which models write calls of tools, or MODEL=FORMAT, comma separated: auto takes that of the chat "
            f"template, none reads no calls; {', '.join(TOOL_FORMATS)}",
        },
    )
    reasoning_parser: tuple[str, ...] = field(
        default=("auto",),
        metadata={
            "help": "format in which models write reasoning, or MODEL=FORMAT, comma separated: auto takes that of the chat "
            f"template, none leaves it in the text; {', '.join(REASONING_FORMATS)}",
        },
    )
    redis: str = field(default="", metadata={"help": "URL of the registry; empty: only --workers are known", "secret": True})
    mesh: str = field(default="default", metadata={"help": "name of the mesh in the registry"})
    workers: tuple[str, ...] = field(
        default=(), metadata={"help": "workers known without a registry, host:port, comma separated"}
    )
    engine_address: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "stock engine that serves vLLM's gRPC engine protocol, as a worker: [NAME=]grpc://HOST:PORT, NAME of its "
            "model here if the engine's own differs",
            "repeated": True,
        },
    )
    engine_timeout_s: float = field(default=5.0, metadata={"help": "silence after which an engine of --engine-address is lost"})
    engine_tenants: Literal["refuse", "share"] = field(
        default="refuse",
        metadata={
            "help": "whether requests of tenants may run on engines of --engine-address, whose prefix caches keep no tenants "
            "apart: refuse, or share"
        },
    )
    router_id: str = field(default="", metadata={"help": "name of this router; empty: a random one"})
    processes: int = field(
        default=1,
        metadata={"help": "processes that share the ports, each a router of its own; they divide what is bounded for a router"},
    )
    share_ports: bool = field(
        default=False, metadata={"help": "let other routers of this user listen on the same ports (SO_REUSEPORT)"}
    )
    sharers: int = field(
        default=1, metadata={"help": "router processes that share these ports, this one included; --processes sets it"}
    )
    objectives: str = field(default="", metadata={"help": "TOML or JSON file with objectives per model"})
    tenants: str = field(
        default="", metadata={"help": "TOML or JSON file with weight, max_inflight, tokens_per_s, burst_tokens of each tenant"}
    )
    tenants_share: float = field(
        default=1.0,
        metadata={"help": "without --redis, the part of the tenants' limits that this router gives out: 1 / number of routers"},
    )
    max_inflight: int = field(default=256, metadata={"help": "requests admitted at the same time"})
    max_queued: int = field(default=256, metadata={"help": "requests that may wait for admission; more are refused"})
    max_streams: int = field(
        default=16384, metadata={"help": "gRPC calls that may be open at the same time, over all connections; more are refused"}
    )
    max_streams_per_connection: int = field(
        default=1024, metadata={"help": "calls that one gRPC connection may have at the same time; more wait at the client"}
    )
    max_connection_age_s: float = field(
        default=0.0,
        metadata={"help": "after how long a gRPC connection takes no new calls, so that clients balance anew; 0: never"},
    )
    max_connection_idle_s: float = field(
        default=600.0, metadata={"help": "after how long without a call a gRPC connection is closed; 0: never"}
    )
    max_queued_bytes: int = field(
        default=64 << 20, metadata={"help": "bytes that prompts may take while they wait; more are refused"}
    )
    hold_timeout_s: float = field(
        default=5.0, metadata={"help": "how long predictions may hold requests back while no slot comes free"}
    )
    aging_s: float = field(
        default=5.0, metadata={"help": "after how long a waiting standard request goes before interactive ones; 0: never"}
    )
    max_buffered_tokens: int = field(
        default=4096, metadata={"help": "tokens held for a client that reads slowly; more cancel it"}
    )
    max_prompt_bytes: int = field(default=2 << 20, metadata={"help": "bytes of prompt text, or of all chat messages"})
    policy: str = field(
        default="predict",
        metadata={
            "help": "how workers are chosen: predict compares predicted costs; the others are there to compare with",
            "choices": POLICIES,
        },
    )
    local_prefill_tokens: int = field(
        default=32, metadata={"help": "prompts with fewer uncached tokens are prefilled by the decode worker"}
    )
    prefix_index_blocks: int = field(
        default=1_000_000,
        metadata={"help": "prompt blocks in the prefix index; a block on two workers counts twice"},
    )
    session_kv_retention_s: int = field(
        default=0,
        metadata={
            "help": "how long the KV of a request with a session is worth keeping that does not say so itself, in seconds; "
            "0: no longer than any other"
        },
    )
    stream_timeout_s: float = field(default=1.0, metadata={"help": "silence after which a worker's stream counts as broken"})
    heartbeat_ms: int = field(default=100, metadata={"help": "period of heartbeats to and from decode workers"})
    report_period_ms: int = field(default=200, metadata={"help": "period of workers' load reports"})
    reattach_grace_s: float = field(default=2.0, metadata={"help": "how long a broken decode stream may take to come back"})
    submit_timeout_s: float = field(
        default=30.0, metadata={"help": "deadline of one Submit call, unless the worker's steps are longer"}
    )
    place_timeout_s: float = field(
        default=5.0, metadata={"help": "how long a new request waits while no worker serves its model"}
    )
    wake_timeout_s: float = field(
        default=0.0,
        metadata={
            "help": "of pools that may go to zero: how long a request waits while no worker decodes its model, and the router is "
            "ready without workers; 0: neither"
        },
    )
    paused_timeout_s: float = field(
        default=600.0,
        metadata={"help": "how long a request waits while workers of its model are paused or asleep, and none takes it"},
    )
    resubmit_timeout_s: float = field(
        default=30.0, metadata={"help": "how long a started request waits for a worker after a loss"}
    )
    room_timeout_s: float = field(
        default=60.0, metadata={"help": "how long an admitted request waits for blocks on decode workers"}
    )
    max_resubmissions: int = field(default=16, metadata={"help": "losses of decode workers that one request survives"})
    hedge_share: float = field(
        default=0.05, metadata={"help": "prompts that may be given to a second worker when the first is late, a share; 0: none"}
    )
    adapter_changes: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={"help": "whether clients may load and unload LoRA adapters: on, off, or auto: unless they need API keys"},
    )
    rebalance: Literal["on", "off"] = field(
        default="on", metadata={"help": "whether running requests leave a decode worker that is nearly full: on or off"}
    )
    forget_worker_s: float = field(default=60.0, metadata={"help": "after how long an unregistered, silent worker is forgotten"})
    drain_grace_s: float = field(default=30.0, metadata={"help": "how long running streams may finish after SIGTERM"})
    linger_s: float = field(
        default=0.5,
        metadata={
            "help": "least time that new calls are answered (UNAVAILABLE) after SIGTERM, until load balancers have noticed"
        },
    )
    tls: TlsConfig = field(default_factory=TlsConfig, metadata={"flatten": True})
    mesh_secret: MeshSecretConfig = field(default_factory=MeshSecretConfig, metadata={"flatten": True})
    tls_client_auth: Literal["require", "none"] = field(
        default="require",
        metadata={"help": "with TLS, whether clients show a certificate of the CA: require, or none to serve any client"},
    )
    log_requests: bool = field(
        default=False, metadata={"help": "write the text of prompts into the log; otherwise nothing that a client says is logged"}
    )
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig, metadata={"flatten": True})
    heartbeat_on_stdout: bool = field(
        default=False, metadata={"help": "write a line to stdout each second, for the process that started this one"}
    )
    exit_with_parent: bool = field(default=False, metadata={"help": "end when the process that started this one ends"})

    @property
    def lets_clients_change_adapters(self) -> bool:
        """Return whether LoadAdapter and UnloadAdapter do anything: a client names folders of the workers' machines."""
        return self.adapter_changes == "on" or (self.adapter_changes == "auto" and not self.api_keys)

    def validate(self) -> None:
        """Check all settings. Raises ValueError that names the field."""
        for name in _AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, name, "must be at least 1")
        for name in (
            "max_queued",
            "http_keep_responses_s",
            "aging_s",
            "local_prefill_tokens",
            "wake_timeout_s",
            "max_resubmissions",
            "drain_grace_s",
            "linger_s",
            "max_connection_age_s",
            "max_connection_idle_s",
        ):
            _require(getattr(self, name) >= 0, name, "must not be negative")
        for name in _POSITIVE:
            _require(getattr(self, name) > 0, name, "must be positive")
        _require(0 <= self.session_kv_retention_s <= 86_400, "session_kv_retention_s", "must be between 0 and 86400 (a day)")
        _require(0 <= self.hedge_share <= 1, "hedge_share", "must be between 0 and 1")
        _require(0 < self.tenants_share <= 1, "tenants_share", "must be more than 0 and at most 1")
        _require(0 <= self.port <= 65535, "port", "must be between 0 and 65535")
        _require(self.http_port is None or 0 <= self.http_port <= 65535, "http_port", "must be between 0 and 65535")
        _require(not self.http_keep_responses_s or bool(self.redis), "http_keep_responses_s", "needs --redis, which keeps them")
        same_host = self.http_host in ("", self.host)
        _require(not (same_host and self.http_port and self.http_port == self.port), "http_port", "is that of gRPC (port)")
        _require(20 <= self.report_period_ms <= 10_000, "report_period_ms", "must be between 20 and 10000")
        _require(10 <= self.heartbeat_ms <= 10_000, "heartbeat_ms", "must be between 10 and 10000")
        _require(
            self.stream_timeout_s * 1000 > 2 * self.heartbeat_ms, "stream_timeout_s", "must exceed two heartbeats (heartbeat_ms)"
        )
        _require(self.stream_timeout_s * 1000 > 2 * self.report_period_ms, "stream_timeout_s", "must exceed two report_period_ms")
        _require(not self.router_id or bool(_ID.fullmatch(self.router_id)), "router_id", "must be 1 to 64 of [A-Za-z0-9_-]")
        for address in self.workers:
            _require(bool(_ADDRESS.fullmatch(address)), "workers", f"{address!r} is not host:port")
        _require(bool(self.models), "models", "name at least one, such as --models smollm2=/path/to/folder")
        _require(self.policy in POLICIES, "policy", f"{self.policy!r} is not known; give one of {', '.join(POLICIES)}")
        self._check_parsers("tool_parser", self.tool_parser, TOOL_FORMATS)
        self._check_parsers("reasoning_parser", self.reasoning_parser, REASONING_FORMATS)
        _require(self.processes <= MAX_PROCESSES, "processes", f"must be at most {MAX_PROCESSES}")
        has_http = self.http_port is not None
        _require(has_http or not self.batches.http_batch_folder, "http_batch_folder", "needs HTTP; give --http-port, too")
        self._check_metrics_ports()
        self._check_engines()

    def _check_parsers(self, field: str, entries: Sequence[str], formats: Iterable[str]) -> None:
        """Check the entries of a parser flag: formats by name, one for all models and one for each model at most."""
        names, models, said = (AUTO, NONE, *formats), self.model_folders(), set[str]()
        for entry in entries:
            model, name = _model_and_format(entry)
            _require(name in names, field, f"{name!r} is not known; give one of {', '.join(names)}")
            _require(not model or model in models, field, f"{model!r} is none of --models ({', '.join(models)})")
            _require(model not in said, field, f"two formats for {model or 'all models'}; give one, or MODEL=FORMAT")
            said.add(model)

    def parsers_of(self, model: str) -> tuple[str, str]:
        """Return the names of the formats of calls and of reasoning that a model was given, "auto" where none."""
        tools, reasoning = (dict(map(_model_and_format, entries)) for entries in (self.tool_parser, self.reasoning_parser))
        return tools.get(model, tools.get("", AUTO)), reasoning.get(model, reasoning.get("", AUTO))

    def _check_metrics_ports(self) -> None:
        """Check the metrics ports, which are consecutive, one for each process."""
        first = self.telemetry.metrics_port
        if not first:
            return
        most, name = 65536 - self.processes, "telemetry.metrics_port"
        _require(first <= most, name, f"each of {self.processes} (--processes) takes the next; give at most {most}")
        host = self.telemetry.metrics_host or self.host
        for flag, port, where in (("--port", self.port, self.host), ("--http-port", self.http_port, self.http_host or self.host)):
            is_taken = where == host and port in range(first, first + self.processes)
            _require(not is_taken, name, f"the ports of {self.processes} (--processes) include {port}, which is {flag}'s")

    def _check_engines(self) -> None:
        """Check the engines: their addresses, and that their models have tokenizers here."""
        folders = self.model_folders()
        for engine in self.engine_addresses():
            known = not engine.model or engine.model in folders
            _require(known, "engine_address", f"{engine.model!r} is not in --models; give its tokenizer there")
            _require(engine.target not in self.workers, "engine_address", f"{engine.target} is in --workers, too")

    def engine_addresses(self) -> tuple[EngineAddress, ...]:
        """Return the stock engines. Raises ValueError."""
        try:
            return parse_all(self.engine_address)
        except ValueError as error:
            raise ValueError(f"engine_address: {error}") from None

    def model_folders(self) -> dict[str, str]:
        """Return the folder of the tokenizer of each model, by name. Raises ValueError."""
        folders: dict[str, str] = {}
        for entry in self.models:
            name, separator, folder = entry.partition("=")
            _require(bool(separator and name and folder), "models", f"{entry!r} is not NAME=FOLDER")
            _require(name not in folders, "models", f"{name!r} is named twice")
            folders[name] = folder
        return folders


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {what}")


def _model_and_format(entry: str) -> tuple[str, str]:
    """Return the model, "" for all, and the format of an entry of a parser flag. Pure."""
    model, _, name = entry.rpartition("=")
    return model.strip(), name.strip()
