"""Configuration of a console process: flags, environment and `--help` come from this dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.client.channel import DEFAULT_ADDRESS, checked_key
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.rpc.tls import ClientTlsConfig
from pdmesh.runtime.telemetry.config import parse_endpoint


@dataclass(frozen=True)
class ConsoleConfig:
    """Shows a mesh on a page: python -m pdmesh.console --routers 127.0.0.1:8100."""

    routers: tuple[str, ...] = field(
        default=(DEFAULT_ADDRESS,), metadata={"help": "routers of the mesh, host:port, comma separated"}
    )
    host: str = field(default="127.0.0.1", metadata={"help": "address to serve the page on; whoever gets there may use the mesh"})
    port: int = field(default=8200, metadata={"help": "port of the page; 0: any free one"})
    allowed_hosts: tuple[str, ...] = field(
        default=(), metadata={"help": "more names under which browsers may ask for the page; addresses and localhost always may"}
    )
    otlp_host: str = field(default="127.0.0.1", metadata={"help": "address to take traces on, by OTLP over gRPC"})
    otlp_port: int = field(default=4317, metadata={"help": "port to take traces on; 0: any free one"})
    otlp_port_is_held: bool = field(
        default=False, metadata={"help": "who started this process holds that port for it, by a socket that does not listen"}
    )
    forward_otlp: str = field(
        default="", metadata={"help": "collector that gets all that arrives here, host:port or https://host:port; empty: none"}
    )
    max_traces: int = field(default=2000, metadata={"help": "traces that are kept, the newest"})
    max_age_s: float = field(default=900.0, metadata={"help": "how long they are kept"})
    max_mib: int = field(default=128, metadata={"help": "memory that they may take, in MiB"})
    api_key: str = field(default="", metadata={"help": "key of an admin, for routers that ask for one", "secret": True})
    tls: ClientTlsConfig = field(default_factory=ClientTlsConfig, metadata={"flatten": True})
    exit_with_parent: bool = field(default=False, metadata={"help": "end when the process that started this one ends"})

    def validate(self) -> None:
        """Raises ConfigError, or ValueError that names the field."""
        if not self.routers:
            raise ConfigError("routers", "is empty", f"name at least one, such as {DEFAULT_ADDRESS}")
        for name in ("port", "otlp_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(name, f"{getattr(self, name)} is no port", "give 0 to 65535")
        for name, least in (("max_traces", 1), ("max_age_s", 1.0), ("max_mib", 1)):
            if not getattr(self, name) >= least:
                raise ConfigError(name, f"{getattr(self, name):g} is less than {least:g}", f"give {least:g} or more")
        if self.forward_otlp:
            parse_endpoint(self.forward_otlp, "forward_otlp")
        checked_key(self.api_key)
