"""Who may ask for external metrics: the API server alone, which shows a certificate of a CA that is made for that.

It says who that CA is in the ConfigMap extension-apiserver-authentication of kube-system. Whether the user may read the metric,
it has asked itself; there is no second question here.
"""

import json
from dataclasses import dataclass
from typing import Any

from pdmesh.autoscaler.kubernetes.api import Api
from pdmesh.autoscaler.platform import PlatformError

CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"


@dataclass(frozen=True)
class Callers:
    """`ca`: PEM. `names`: common names of certificates that count; empty: all that the CA has signed."""

    ca: str
    names: tuple[str, ...] = ()

    def knows(self, certificate: dict[str, Any] | None) -> bool:
        """A certificate of the CA, as `SSLSocket.getpeercert` shows it. None: there is none."""
        if not certificate:
            return False
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        return not self.names or any(name in self.names for name in names)


async def read_front_proxy(api: Api) -> Callers:
    """What the cluster says. Raises PlatformError."""
    data = (await api.get(CONFIG_MAP)).get("data") or {}
    ca = data.get("requestheader-client-ca-file")
    if not ca:
        raise PlatformError("the API server has no CA for extensions (--requestheader-client-ca-file); name one: --…-client-ca")
    try:
        names = json.loads(data.get("requestheader-allowed-names") or "[]")
    except ValueError:
        names = None
    if not isinstance(names, list):
        raise PlatformError(
            "requestheader-allowed-names in extension-apiserver-authentication is no list; name a CA: --…-client-ca"
        )
    return Callers(ca, tuple(str(name) for name in names))
