"""Holds the settings of the cluster: flags, environment and `--help` come from here. Durations in seconds."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.autoscaler.views import PoolName
from pdmesh.runtime.config import ConfigError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MIN_REQUEST_S = 0.1
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class KubernetesSettings:
    """Name the Deployments, configure leader election, and bound how long a person's change is held."""

    namespace: str = field(default="", metadata={"help": "of the Deployments; empty: that of this pod"})
    kubeconfig: str = field(default="", metadata={"help": "kubeconfig of the API server; empty: as a pod does"})
    context: str = field(default="", metadata={"help": "of the kubeconfig; empty: its current one"})
    prefill_deployment: str = field(default="pdmesh-prefill", metadata={"help": "Deployment of prefill workers"})
    decode_deployment: str = field(default="pdmesh-decode", metadata={"help": "Deployment of decode workers"})
    both_deployment: str = field(
        default="", metadata={"help": "Deployment of workers with both roles, in place of the other two; empty: there is none"}
    )
    manual_hold_s: float = field(
        default=1800.0, metadata={"help": "how long replicas set by someone else are kept; 0: not at all"}
    )
    request_timeout_s: float = field(default=4.0, metadata={"help": "for one request to the API server"})
    lease: str = field(default="pdmesh-autoscaler", metadata={"help": "Lease that the leader holds"})
    state: str = field(default="pdmesh-autoscaler-state", metadata={"help": "ConfigMap in which a leader saves its state"})
    identity: str = field(default="", metadata={"help": "of this process among candidates; empty: host name and a random part"})
    lease_duration_s: int = field(default=15, metadata={"help": "after which a silent leader is replaced"})
    renew_deadline_s: float = field(default=10.0, metadata={"help": "after which a leader that cannot renew steps down"})
    retry_period_s: float = field(default=2.0, metadata={"help": "between two attempts to lead or to go on leading"})

    def validate(self) -> None:
        """Raise ConfigError for invalid settings."""
        for name in ("prefill_deployment", "decode_deployment", "both_deployment", "lease", "state"):
            self._check_name(name)
        if self.namespace and not _LABEL.fullmatch(self.namespace):
            raise ConfigError("namespace", f"{self.namespace!r} is not a namespace's name", "use a-z, 0-9 and -")
        if len(self.identity) > 128:
            raise ConfigError("identity", f"has {len(self.identity)} characters", "an Event takes 128")
        if self.manual_hold_s < 0:
            raise ConfigError("manual_hold_s", f"{self.manual_hold_s:g} is less than 0", "0 turns it off")
        if self.request_timeout_s < MIN_REQUEST_S:
            problem = f"{self.request_timeout_s:g} is less than {MIN_REQUEST_S:g}"
            raise ConfigError("request_timeout_s", problem, "give the API server a few seconds")
        self._check_lease()

    def _check_name(self, name: str) -> None:
        value = getattr(self, name)
        if not value and name not in ("both_deployment", "prefill_deployment", "decode_deployment"):
            raise ConfigError(name, "is empty", "give it a name")
        if value and not _NAME.fullmatch(value):
            raise ConfigError(name, f"{value!r} is no name of an object", "use a-z, 0-9, - and .")
        if not value and not self.both_deployment and name != "both_deployment":
            raise ConfigError(name, "is empty", "name the Deployment, or --…-both-deployment in place of the two")

    def _check_lease(self) -> None:
        """Check that a leader stops before others may take over, and that all it has sent by then has arrived or failed."""
        if self.retry_period_s < MIN_REQUEST_S:
            raise ConfigError(
                "retry_period_s", f"{self.retry_period_s:g} is less than {MIN_REQUEST_S:g}", "two seconds are usual"
            )
        if self.renew_deadline_s <= self.retry_period_s:
            problem = f"{self.renew_deadline_s:g} is no more than retry_period_s, {self.retry_period_s:g}"
            raise ConfigError("renew_deadline_s", problem, "leave time for several attempts")
        if self.lease_duration_s < self.renew_deadline_s + self.request_timeout_s:
            problem = f"{self.lease_duration_s} is less than renew_deadline_s and request_timeout_s together"
            raise ConfigError("lease_duration_s", problem, "else another may lead while a last request is under way")

    @property
    def deployments(self) -> dict[PoolName, str]:
        """Return the Deployment of each pool."""
        if self.both_deployment:
            return {PoolName.BOTH: self.both_deployment}
        return {PoolName.PREFILL: self.prefill_deployment, PoolName.DECODE: self.decode_deployment}

    def own_namespace(self) -> str:
        """Return the given namespace, else the pod's. Raises ConfigError without either."""
        if self.namespace:
            return self.namespace
        try:
            return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        except OSError:
            raise ConfigError("namespace", "is empty, and this is no pod with an account", "name the namespace") from None


# How the wanted replicas are served to HPA and KEDA.


@dataclass(frozen=True)
class MetricsSettings:
    """Configure the ports: an empty one is off; 0 picks a free one."""

    port: int | None = field(default=None, metadata={"help": "port of external.metrics.k8s.io, HTTPS; empty: not served"})
    cert: str = field(default="", metadata={"help": "certificate of that port, PEM file"})
    key: str = field(default="", metadata={"help": "its private key, PEM file"})
    client_ca: str = field(
        default="", metadata={"help": "CA of clients that may ask there, PEM file; empty: the cluster's front-proxy CA"}
    )
    client_names: tuple[str, ...] = field(
        default=(),
        metadata={"help": "common names of clients that may ask, with --…-client-ca; empty: any that the CA has signed"},
    )
    json_port: int | None = field(default=None, metadata={"help": "port of the same as plain JSON (KEDA), HTTP; empty: none"})
    max_age_s: float = field(default=30.0, metadata={"help": "older decisions are not shown: HPA and KEDA then change nothing"})

    @property
    def is_set(self) -> bool:
        """Return whether anything is to be served."""
        return self.port is not None or self.json_port is not None

    def validate(self) -> None:
        """Raise ConfigError for invalid settings."""
        for name in ("port", "json_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(name, f"{value} is not a port", "give 0 to 65535")
        if self.port is not None and not (self.cert and self.key):
            raise ConfigError("cert" if not self.cert else "key", "is missing", "the API server asks over HTTPS only")
        if self.max_age_s <= 0:
            raise ConfigError("max_age_s", f"{self.max_age_s:g} is not more than 0", "30 is usual")
