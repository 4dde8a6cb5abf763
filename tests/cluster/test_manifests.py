"""The API server takes every manifest and gives it back as it was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.autoscaling import tuned
from tests.cluster.cluster import NAMESPACE, Cluster
from tests.cluster.overlay import definitions, mapped, text_of
from tests.k8s.kustomize import FOLDER, name_of, parsed, render
from tests.k8s.meshes import EXAMPLES, MESHES
from tests.k8s.programs import quantity

_QUANTITIES = ("cpu", "memory", "sizeLimit", "storage")
_APPLIED = {**MESHES, **{name: (name,) for name in EXAMPLES}}
"""The folders that people apply together, by the one that they are about."""


@pytest.mark.parametrize("mesh", _APPLIED)
def test_the_server_takes_every_overlay_and_gives_it_back_whole(cluster: Cluster, api_key: str, mesh: str) -> None:
    objects = [mapped(manifest) for folder in _APPLIED[mesh] for manifest in render(FOLDER / folder)]
    cluster.apply(item for item in objects if item["kind"] == "Namespace")
    if needed := definitions(objects):
        cluster.plane.kubectl("apply", "-f", "-", stdin=text_of(needed))
        names = [f"crd/{definition['metadata']['name']}" for definition in needed]
        cluster.plane.kubectl("wait", "--for=condition=established", "--timeout=30s", *names)
    dry = cluster.plane.kubectl("apply", "--dry-run=server", "-o", "json", "-f", "-", stdin=text_of(objects))
    taken = {name_of(item): item for document in parsed(dry) for item in document.get("items", [document])}
    for item in objects:
        assert missing(item, taken[name_of(item)]) == [], name_of(item)


def test_what_was_applied_reads_back_whole(mesh: Cluster) -> None:
    wanted = [mapped(manifest) for manifest in tuned()]
    (read,) = parsed(mesh.plane.kubectl("get", "-f", "-", "-o", "json", stdin=text_of(wanted)))
    found = {name_of(item): item for item in read["items"]}
    for item in wanted:
        assert missing(item, found[name_of(item)]) == [], name_of(item)


def test_applying_again_changes_nothing(mesh: Cluster) -> None:
    before = _generations(mesh)
    mesh.apply(tuned())
    assert _generations(mesh) == before


def _generations(cluster: Cluster) -> dict[str, int]:
    """Of the Deployments: it rises with each change of what is wanted."""
    items = cluster.plane.get("-n", NAMESPACE, "deployments")["items"]
    return {item["metadata"]["name"]: item["metadata"]["generation"] for item in items}


def missing(wanted: Any, got: Any, path: str = "") -> list[str]:
    """Paths at which `got` does not have what `wanted` says; what the server adds is its own."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return [line for key, value in wanted.items() for line in missing(value, got.get(key), f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        return [line for index, value in enumerate(wanted) for line in missing(value, got[index], f"{path}[{index}]")]
    if wanted == got or (wanted in ({}, [], None) and not got) or _same_quantity(wanted, got, path):
        return []
    return [f"{path}: {wanted!r}, read back as {got!r}"]


def _same_quantity(wanted: object, got: object, path: str) -> bool:
    if not path.endswith(_QUANTITIES) or got is None:
        return False
    return quantity(str(wanted)) == quantity(str(got))
