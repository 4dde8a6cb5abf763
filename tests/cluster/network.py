"""Addresses of the test's cluster. They live in a network namespace: they are the same everywhere and meet nobody else's."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.namespaces import bind, enter_private_network, ip

BRIDGE = "pods0"
GATEWAY = "10.244.0.1"
"""This end of the bridge: the node's own address. The API server listens there, too: an Endpoints object takes no loopback."""
POD_PREFIX = "10.244"
PREFIX_LENGTH = 16
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
API_PORT = 6443
ETCD_PORT = 2379
CLUSTER_DOMAIN = "cluster.local"


def enter(folder: Path) -> None:
    """This process becomes the node: a bridge for the pods' cables, and names as the cluster's pods see them."""
    enter_private_network()
    ip(
        f"link add {BRIDGE} type bridge",
        f"addr add {GATEWAY}/{PREFIX_LENGTH} dev {BRIDGE}",
        f"link set {BRIDGE} up",
        f"addr add {DNS_SERVICE}/32 dev lo",
    )
    # A bridge without an end that is up has no carrier, and then a /16 without a route.
    resolver = folder / "resolv.conf"
    resolver.write_text(resolv_conf("default"), encoding="ascii")
    bind(str(resolver), str(Path("/etc/resolv.conf").resolve()))


def resolv_conf(namespace: str) -> str:
    """/etc/resolv.conf of a pod."""
    search = " ".join((f"{namespace}.svc.{CLUSTER_DOMAIN}", f"svc.{CLUSTER_DOMAIN}", CLUSTER_DOMAIN))
    return f"nameserver {DNS_SERVICE}\nsearch {search}\noptions ndots:5 timeout:2\n"


def pod_address(number: int) -> str:
    """Of the `number`th pod, from 0. Raises ValueError for the last of too many."""
    if number >= 250 * 250:
        raise ValueError(f"no address for pod {number}")
    return f"{POD_PREFIX}.{1 + number // 250}.{1 + number % 250}"
