"""The external metrics, and who asks for them: an API server over TLS, or KEDA."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pdmesh.autoscaler.kubernetes import metrics_server
from pdmesh.autoscaler.kubernetes.metrics_server import MetricsServer
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings, MetricsSettings
from pdmesh.autoscaler.views import Decision, PoolDecision, PoolName
from pdmesh.runtime.rpc.certificates import make_certificates
from tests.autoscaler.kubernetes.api_server import ApiServer

BASE = "/apis/external.metrics.k8s.io/v1beta1"
METRIC = f"{BASE}/namespaces/mesh/pdmesh_wanted_replicas"
DECISION = Decision((PoolDecision(PoolName.PREFILL, 1, 2, "x"), PoolDecision(PoolName.DECODE, 1, 5, "x")))


class Asked:
    """A server, and who asks it: with certificates of one CA, which the cluster names as that of its API server. `shown` by who
    asks; the server has copies of it at `cert` and `key`, and is believed by `ca`."""

    def __init__(self, server: ApiServer, folder: Path, max_age_s: float = 30.0, names: str = '["pdmesh"]') -> None:
        self.shown = make_certificates(folder / "tls", days=30)
        self.ca = self.shown.tls_ca
        self.cert = shutil.copy(self.shown.tls_cert, folder / "served.crt")
        self.key = shutil.copy(self.shown.tls_key, folder / "served.key")
        self._api, self._names = server, names
        self.name_ca(self.ca)
        settings = MetricsSettings(port=0, cert=str(self.cert), key=str(self.key), json_port=0, max_age_s=max_age_s)
        settings.validate()
        cluster = KubernetesSettings(namespace="mesh", kubeconfig=server.kubeconfig(folder))
        self.server = MetricsServer(settings, cluster, "127.0.0.1", "smollm2")

    def name_ca(self, path: str) -> None:
        """The cluster does, as that of its API server."""
        data = {"requestheader-client-ca-file": Path(path).read_text(), "requestheader-allowed-names": self._names}
        self._api.put(metrics_server.CONFIG_MAP, {"metadata": {"name": "extension-apiserver-authentication"}, "data": data})

    async def get(self, path: str, *, shows_certificate: bool = True) -> tuple[int, Any]:
        """Status and JSON."""
        url = f"https://127.0.0.1:{self.server.ports['kubernetes']}{path}"
        return await _get(url, self.context(shows_certificate=shows_certificate))

    def context(self, *, shows_certificate: bool = True) -> ssl.SSLContext:
        """Of who asks."""
        context = ssl.create_default_context(cafile=self.ca)
        context.check_hostname = False
        if shows_certificate:
            context.load_cert_chain(self.shown.tls_cert, self.shown.tls_key)
        return context

    async def get_json(self, path: str) -> tuple[int, Any]:
        """As KEDA."""
        return await _get(f"http://127.0.0.1:{self.server.ports['json']}{path}", None)


async def _get(url: str, context: ssl.SSLContext | None) -> tuple[int, Any]:
    def ask() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return await asyncio.to_thread(ask)


async def answered_soon(asked: Asked, path: str = METRIC) -> int:
    """Status of the metric, once the port is open to who asks."""
    for _ in range(100):
        try:
            return (await asked.get(path))[0]
        except OSError:
            await asyncio.sleep(0.05)
    return 0
