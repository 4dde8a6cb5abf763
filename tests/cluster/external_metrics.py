"""The autoscaler as an adapter: it says how many replicas are wanted, and HPA, of the cluster's own controllers, sets them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdmesh.certificates import make_ca, sign
from tests.cluster.autoscaling import DECODE, NAME
from tests.cluster.cluster import NAMESPACE, Cluster
from tests.k8s.kustomize import Manifest

METRIC = "pdmesh_wanted_replicas"
PORT = 6443
_GROUP = "external.metrics.k8s.io"
_SECRET = "pdmesh-autoscaler-tls"
_RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True)
class Adapter:
    """Of the mesh's autoscaler, which from `begin` on scales nothing by itself."""

    cluster: Cluster

    def begin(self) -> None:
        """Registered with the API server, which says that it is available; an HPA follows it."""
        plane = self.cluster.plane
        bundle = self._make_certificate()
        plane.kubectl("-n", NAMESPACE, "patch", "deployment", NAME, "--patch", json.dumps(_patch()))
        self.cluster.wait_rolled_out(NAME)
        self.cluster.apply([_service(), _registration(bundle), *_rights(), _horizontal_autoscaler()])
        plane.kubectl("wait", "--for=condition=Available", "--timeout=60s", f"apiservice/v1beta1.{_GROUP}")

    def wanted(self, pool: str) -> list[Any]:
        """What the API server answers about a pool, by way of the adapter."""
        path = f"/apis/{_GROUP}/v1beta1/namespaces/{NAMESPACE}/{METRIC}?labelSelector=pool%3D{pool}"
        items: list[Any] = json.loads(self.cluster.plane.kubectl("get", "--raw", path))["items"]
        return items

    def _make_certificate(self) -> str:
        """For the adapter's Service; its CA, in base64."""
        folder = self.cluster.folder / "adapter"
        folder.mkdir()
        ca = make_ca(folder / "ca")
        cert, key = sign(ca, folder / "tls", name=f"{NAME}.{NAMESPACE}.svc")
        files = (f"--from-file=tls.crt={cert}", f"--from-file=tls.key={key}")
        self.cluster.plane.kubectl("-n", NAMESPACE, "create", "secret", "generic", _SECRET, *files)
        return base64.b64encode(Path(f"{ca}.crt").read_bytes()).decode()


def _patch() -> Manifest:
    """One process that decides and sets nothing, and answers."""
    variables = {
        "PDMESH_PLATFORM": "dry-run",
        "PDMESH_EXTERNAL_METRICS_PORT": str(PORT),
        "PDMESH_EXTERNAL_METRICS_CERT": "/etc/pdmesh/adapter/tls.crt",
        "PDMESH_EXTERNAL_METRICS_KEY": "/etc/pdmesh/adapter/tls.key",
    }
    container = {
        "name": "autoscaler",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [{"name": "adapter", "mountPath": "/etc/pdmesh/adapter", "readOnly": True}],
    }
    pod = {"containers": [container], "volumes": [{"name": "adapter", "secret": {"secretName": _SECRET}}]}
    return {"spec": {"replicas": 1, "template": {"spec": pod}}}


def _service() -> Manifest:
    spec = {"selector": {"app.kubernetes.io/name": NAME}, "ports": [{"name": "https", "port": 443, "targetPort": PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME, "namespace": NAMESPACE}, "spec": spec}


def _registration(bundle: str) -> Manifest:
    spec = {
        "group": _GROUP,
        "version": "v1beta1",
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "caBundle": bundle,
        "service": {"name": NAME, "namespace": NAMESPACE, "port": 443},
    }
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1beta1.{_GROUP}"},
        "spec": spec,
    }


def _rights() -> list[Manifest]:
    """The adapter may read who the API server is; the controller of HPAs may read the metric."""
    reader = {"kind": "Role", "name": "extension-apiserver-authentication-reader", "apiGroup": _RBAC}
    metrics = {"kind": "ClusterRole", "name": "external-metrics-reader", "apiGroup": _RBAC}
    version = f"{_RBAC}/v1"
    rule = {"apiGroups": [_GROUP], "resources": ["*"], "verbs": ["get", "list"]}
    return [
        {
            "apiVersion": version,
            "kind": "RoleBinding",
            "metadata": {"name": "pdmesh-autoscaler-authentication", "namespace": "kube-system"},
            "roleRef": reader,
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}],
        },
        {"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": "external-metrics-reader"}, "rules": [rule]},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "external-metrics-reader"},
            "roleRef": metrics,
            "subjects": [{"kind": "ServiceAccount", "name": "horizontal-pod-autoscaler", "namespace": "kube-system"}],
        },
    ]


def _horizontal_autoscaler() -> Manifest:
    metric = {"name": METRIC, "selector": {"matchLabels": {"pool": "decode"}}}
    target = {"type": "AverageValue", "averageValue": "1"}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": DECODE},
        "minReplicas": 1,
        "maxReplicas": 3,
        "metrics": [{"type": "External", "external": {"metric": metric, "target": target}}],
    }
    metadata = {"name": DECODE, "namespace": NAMESPACE}
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": metadata, "spec": spec}
