"""Who reaches whom under the network policies: exactly the mesh's own flows, port by port."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.k8s.kustomize import Manifest
from tests.k8s.meshes import MESHES, of_kind, selects, workloads

NAME = "kubernetes.io/metadata.name"
APP = "app.kubernetes.io/name"
GRPC, KV, METRICS = {50051, 50061}, {50052, 50062}, {9464, 9465}


@dataclass(frozen=True)
class Peer:
    """A pod, with the labels of its namespace."""

    name: str
    labels: tuple[tuple[str, str], ...]
    namespace: tuple[tuple[str, str], ...] = ((NAME, "pdmesh"),)
    ports: tuple[int, ...] = ()

    @property
    def is_ours(self) -> bool:
        return dict(self.namespace)[NAME] == "pdmesh"


OUTSIDE = (
    Peer("client", (("pdmesh-client", "true"),), ((NAME, "apps"),)),
    Peer("client namespace", (), ((NAME, "apps"), ("pdmesh-client", "true"))),
    Peer("monitoring", (), ((NAME, "monitoring"),)),
    Peer("stranger", ((APP, "pdmesh-router"), ("app.kubernetes.io/component", "worker")), ((NAME, "other"),), (443,)),
)
INSIDE = (Peer("client inside", (("pdmesh-client", "true"),)), Peer("stranger inside", (("a", "b"),), ports=(443,)))
DNS = Peer("dns", (("k8s-app", "kube-dns"),), ((NAME, "kube-system"),), (53,))


def _peers(mesh: str) -> list[Peer]:
    ours = [Peer(each.labels[APP], tuple(each.labels.items()), ports=tuple(each.ports())) for each in workloads(mesh)]
    return [*ours, *INSIDE, *OUTSIDE, DNS]


def _is_allowed(policies: list[Manifest], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """The API's rules: what no policy selects is open; what one selects is shut but for what some policy opens."""
    out = _side(policies, source, target, "Egress", port, protocol)
    return out and _side(policies, target, source, "Ingress", port, protocol)


def _side(policies: list[Manifest], own: Peer, other: Peer, direction: str, port: int, protocol: str) -> bool:
    specs = [policy["spec"] for policy in policies if own.is_ours]
    chosen = [spec for spec in specs if direction in spec["policyTypes"] and selects(spec["podSelector"], dict(own.labels))]
    rules = [rule for spec in chosen for rule in spec.get(direction.lower(), ())]
    return not chosen or any(_opens(rule, other, direction, port, protocol) for rule in rules)


def _opens(rule: Manifest, other: Peer, direction: str, port: int, protocol: str) -> bool:
    peers = rule.get("from" if direction == "Ingress" else "to")
    is_meant = peers is None or any(_is_meant(peer, other) for peer in peers)
    return {"port": port, "protocol": protocol} in rule["ports"] and is_meant


def _is_meant(peer: Manifest, other: Peer) -> bool:
    in_namespace = selects(peer["namespaceSelector"], dict(other.namespace)) if "namespaceSelector" in peer else other.is_ours
    return in_namespace and selects(peer.get("podSelector", {}), dict(other.labels))


def _expected(source: str, target: str, port: int) -> bool:
    """The drawing in k8s/base/network.yaml. The API server is no pod: to get there, the autoscaler gets out at its ports."""
    workers = ("pdmesh-prefill", "pdmesh-decode")
    if port in METRICS:
        return source == "monitoring" and target in (*workers, "pdmesh-router", "pdmesh-autoscaler")
    if target == "dns":
        return True
    if target in ("pdmesh-collector", "pdmesh-jaeger"):
        shown = {"pdmesh-collector": 8889, "pdmesh-jaeger": 16686}[target]
        senders = (*workers, "pdmesh-router", "pdmesh-autoscaler")
        return (port == 4317 and source in senders) or (port == shown and source == "monitoring")
    if source == "pdmesh-autoscaler":
        return (target in workers and port == 50051) or (target == "pdmesh-router" and port == 8100) or target == "stranger"
    if target in workers:
        return port in GRPC if source == "pdmesh-router" else source in workers and port in GRPC | KV
    if target == "pdmesh-redis":
        return source in ("pdmesh-router", *workers)
    if target == "pdmesh-router":
        return source.startswith("client") or source == "pdmesh-loadtest"
    return False


@pytest.mark.parametrize("mesh", MESHES)
def test_the_meshs_own_flows_are_open_and_nothing_else(mesh: str) -> None:
    policies, peers = of_kind(mesh, "NetworkPolicy"), _peers(mesh)
    assert {port for peer in peers for port in peer.ports} >= {50051, 50052, 8100, 8000, 6379, 4317, 53}
    for source in peers:
        for target in peers:
            if not (source.is_ours or target.is_ours):
                continue
            for port in target.ports:
                allowed = _is_allowed(policies, source, target, port)
                expected = _expected(source.name, target.name, port)
                assert allowed == expected, f"{source.name} -> {target.name}:{port}"


@pytest.mark.parametrize("mesh", MESHES)
def test_every_pod_asks_for_names(mesh: str) -> None:
    policies = of_kind(mesh, "NetworkPolicy")
    for peer in _peers(mesh):
        assert not peer.is_ours or _is_allowed(policies, peer, DNS, 53, "UDP")
