"""The chart in the cluster: helm as people call it, and what a release leaves."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tomllib
from collections.abc import Mapping
from typing import Any

from tests.cluster.autoscaling import OBJECTIVES, SETTINGS, WORKER_SETTINGS
from tests.cluster.cluster import NAMESPACE, Cluster
from tests.k8s.kustomize import FOLDER
from tests.k8s.tools import HELM

RELEASE = "pdmesh"
PART_OF = "app.kubernetes.io/part-of=pdmesh"
MADE = "pdmesh-made-by=chart"
_KINDS = (
    "deployments,replicasets,pods,services,configmaps,serviceaccounts,roles,rolebindings,leases,networkpolicies,"
    "poddisruptionbudgets,horizontalpodautoscalers,jobs"
)
_TIMEOUT_S = 300


class Chart:
    """One release in the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._values = cluster.folder / "values.json"
        self._values.write_text(json.dumps(VALUES), encoding="utf-8")

    def helm(self, *arguments: str, timeout_s: float = _TIMEOUT_S) -> str:
        """What helm prints, as admin. Raises RuntimeError with what it says of an error, and the pods' states."""
        assert HELM is not None
        home = self.cluster.folder / "helm"
        environment = {**os.environ, "HOME": str(home), "KUBECONFIG": str(self.cluster.plane.kubeconfig("admin"))}
        command = [str(HELM), "-n", NAMESPACE, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s + 60, check=False)
        if done.returncode:
            raise RuntimeError(f"helm {' '.join(arguments)}: {done.stderr.strip()}\n{self.cluster.report()}")
        return done.stdout

    def install(self) -> str:
        """As docs/kubernetes.md says."""
        return self.helm("install", RELEASE, str(FOLDER / "chart"), "--create-namespace", *self._flags({}))

    def upgrade(self, values: Mapping[str, str]) -> str:
        """To a new revision, with further values."""
        return self.helm("upgrade", RELEASE, str(FOLDER / "chart"), *self._flags(values))

    def rollback(self) -> str:
        """To the revision before."""
        return self.helm("rollback", RELEASE, "--wait", f"--timeout={_TIMEOUT_S}s")

    def uninstall(self) -> str:
        """And wait for everything to go."""
        return self.helm("uninstall", RELEASE, "--wait", f"--timeout={_TIMEOUT_S}s")

    def revision(self) -> tuple[int, str]:
        """Number and state of the latest."""
        latest = json.loads(self.helm("history", RELEASE, "-o", "json"))[-1]
        return int(latest["revision"]), str(latest["status"])

    def client_key(self) -> str:
        """The key that the first install made for a client."""
        secret = self.cluster.plane.get("-n", NAMESPACE, "secret", f"{RELEASE}-client-key")
        return base64.b64decode(secret["data"]["key"]).decode()

    def secrets(self) -> dict[str, Any]:
        """What the chart made, by name."""
        found = self.cluster.plane.get("-n", NAMESPACE, "secrets", "-l", MADE)["items"]
        return {secret["metadata"]["name"]: secret["data"] for secret in found}

    def left(self) -> set[str]:
        """Objects of the namespace that are none of Kubernetes' own, kind and name."""
        listed = self.cluster.plane.get("-n", NAMESPACE, _KINDS)["items"]
        names = {f"{item['kind']} {item['metadata']['name']}" for item in listed}
        of_cluster = self.cluster.plane.get("priorityclasses", "-l", PART_OF)["items"]
        names |= {f"PriorityClass {item['metadata']['name']}" for item in of_cluster}
        return names - {"ConfigMap kube-root-ca.crt", "ServiceAccount default"}

    def _flags(self, values: Mapping[str, str]) -> list[str]:
        sets = [part for name, value in values.items() for part in ("--set-string", f"{name}={value}")]
        return ["-f", str(self._values), *sets, "--wait", f"--timeout={_TIMEOUT_S}s"]


VALUES = {
    "objectives": tomllib.loads(OBJECTIVES),
    "telemetry": {"enabled": False},  # its programs are not here
    "decode": {"env": dict(WORKER_SETTINGS)},
    "autoscaler": {"env": {name: value for name, value in SETTINGS.items() if not name.endswith("MAX_REPLICAS")}},
}
