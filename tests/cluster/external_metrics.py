"""The example with HPA: the autoscaler says how many replicas are wanted, and a controller of the cluster's own sets them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdmesh.runtime.rpc.certificates import make_ca, sign
from tests.cluster.autoscaling import NAME, tuned
from tests.cluster.cluster import NAMESPACE, Cluster

METRIC = "pdmesh_wanted_replicas"
EXAMPLE = "examples/hpa"
_SERVICE = "pdmesh-external-metrics"
_REGISTRATION = "v1beta1.external.metrics.k8s.io"


@dataclass(frozen=True)
class Adapter:
    """Of the mesh's autoscaler, which from `begin` on scales nothing by itself."""

    cluster: Cluster

    def begin(self) -> None:
        """Applied; the API server says that the adapter is available."""
        plane = self.cluster.plane
        bundle = self._make_certificate()
        manifests = {(item["kind"], item["metadata"]["name"]): item for item in tuned(EXAMPLE)}
        # What cert-manager does where there is one.
        manifests["APIService", _REGISTRATION]["spec"]["caBundle"] = bundle
        self.cluster.apply(manifests.values())
        self.cluster.wait_rolled_out(NAME)
        plane.kubectl("wait", "--for=condition=Available", "--timeout=60s", f"apiservice/{_REGISTRATION}")

    def wanted(self, pool: str) -> list[Any]:
        """What the API server answers about a pool, by way of the adapter."""
        path = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{NAMESPACE}/{METRIC}?labelSelector=pool%3D{pool}"
        answer = self.cluster.plane.kubectl("get", "--raw", path, check=False)
        if not answer.startswith("{"):
            return []
        items: list[Any] = json.loads(answer)["items"]
        return items

    def _make_certificate(self) -> str:
        """For the adapter's Service; its CA, in base64."""
        folder = self.cluster.folder / "adapter"
        folder.mkdir()
        ca = make_ca(folder / "ca")
        cert, key = sign(ca, folder / "tls", name=f"{_SERVICE}.{NAMESPACE}.svc")
        files = (f"--from-file=tls.crt={cert}", f"--from-file=tls.key={key}")
        self.cluster.plane.kubectl("-n", NAMESPACE, "create", "secret", "generic", _SERVICE, *files)
        return base64.b64encode(Path(f"{ca}.crt").read_bytes()).decode()
