"""Where the wanted replicas are shown to HPA and KEDA: flags, environment and `--help` come from here."""

from dataclasses import dataclass, field

from pdmesh.runtime.config import ConfigError


@dataclass(frozen=True)
class MetricsSettings:
    """Ports are off where they are empty; 0 picks a free one."""

    port: int | None = field(default=None, metadata={"help": "port of external.metrics.k8s.io, HTTPS; empty: not served"})
    cert: str = field(default="", metadata={"help": "certificate of that port, PEM file"})
    key: str = field(default="", metadata={"help": "its private key, PEM file"})
    client_ca: str = field(
        default="", metadata={"help": "CA of who may ask there, PEM file; empty: what the cluster says of its API server"}
    )
    client_names: tuple[str, ...] = field(
        default=(), metadata={"help": "common names of who may ask, with --…-client-ca; empty: any that the CA has signed"}
    )
    json_port: int | None = field(default=None, metadata={"help": "port of the same as plain JSON (KEDA), HTTP; empty: none"})
    max_age_s: float = field(default=30.0, metadata={"help": "older decisions are not shown: whoever asks then changes nothing"})

    @property
    def is_set(self) -> bool:
        """Whether anything is to be served."""
        return self.port is not None or self.json_port is not None

    def validate(self) -> None:
        """Raises ConfigError."""
        for name in ("port", "json_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(name, f"{value} is no port", "give 0 to 65535")
        if self.port is not None and not (self.cert and self.key):
            raise ConfigError("cert" if not self.cert else "key", "is missing", "the API server asks over HTTPS only")
        if self.max_age_s <= 0:
            raise ConfigError("max_age_s", f"{self.max_age_s:g} is not more than 0", "30 is usual")
