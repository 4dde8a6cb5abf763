"""A Node object, kept alive: its Lease is renewed and its conditions are written, as a kubelet does."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from tests.cluster import network
from tests.cluster.agent.api import MERGE_PATCH, Api, ApiError, Object
from tests.cluster.agent.running import now

PERIOD_S = 5.0
_RETRY_S = 1.0
CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "256Gi"}
"""More than the machine has: the scheduler places what the manifests ask for, of which a small model needs a part."""


class Node:
    """One of several that this machine plays."""

    def __init__(self, api: Api, name: str) -> None:
        self._api, self._name = api, name

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._register()
                while True:
                    await self._beat()
                    await asyncio.sleep(PERIOD_S)
            except ApiError:
                await asyncio.sleep(_RETRY_S)

    async def _register(self) -> None:
        labels = {"kubernetes.io/hostname": self._name, "kubernetes.io/os": "linux", "topology.kubernetes.io/zone": self._name}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._name, "labels": labels}}
        lease: Object = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
        lease["spec"] = {"holderIdentity": self._name, "leaseDurationSeconds": 40}
        await self._make("/api/v1/nodes", node)
        await self._make("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease)

    async def _make(self, path: str, body: Object) -> None:
        try:
            await self._api.call("POST", path, body)
        except ApiError as error:
            if error.status != 409:
                raise

    async def _beat(self) -> None:
        kinds = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
        conditions = [
            {"type": kind, "status": status, "reason": "Agent", "lastHeartbeatTime": now(), "lastTransitionTime": now()}
            for kind, status in kinds.items()
        ]
        addresses = [{"type": "InternalIP", "address": network.GATEWAY}, {"type": "Hostname", "address": self._name}]
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": conditions, "addresses": addresses}
        await self._api.call("PATCH", f"/api/v1/nodes/{self._name}/status", {"status": status}, kind=MERGE_PATCH)
        renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self._name}"
        await self._api.call("PATCH", path, {"spec": {"renewTime": renewed}}, kind=MERGE_PATCH)
