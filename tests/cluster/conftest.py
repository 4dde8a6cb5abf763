"""One cluster for all tests of this folder, in a network of its own, and a mesh in it. At the end nothing of it is left."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh.engine.loader.hash import cache_folder
from tests.cluster import build, network
from tests.cluster.autoscaling import DECODE, PREFILL, SWITCH, Autoscaler, tuned
from tests.cluster.cluster import NAMESPACE, Cluster
from tests.cluster.leftovers import Footprint
from tests.k8s.kustomize import FOLDER, render

_MODEL = "smollm2-135m-instruct"
_ORDER = ("test_chart", "test_manifests", "test_mesh", "test_autoscaler", "test_outages", "test_prefill", "test_hpa")
MESH = ("pdmesh-redis", "pdmesh-prefill", "pdmesh-decode", "pdmesh-router")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A rollout takes its minute. What changes the mesh for good comes late."""
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in ours:
        item.add_marker(pytest.mark.timeout(420))
    others = [item for item in items if item not in ours]
    items[:] = [*others, *sorted(ours, key=lambda item: _ORDER.index(item.path.stem))]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Control plane and nodes; nothing is in it yet."""
    model = cache_folder() / "models" / _MODEL
    assert model.exists(), f"{model} is missing: run make model"
    programs = build.build(build.default_cache())
    folder = Path(tempfile.mkdtemp(prefix="pdmesh-cluster-"))
    network.enter(folder)
    footprint = Footprint(folder)
    try:
        with Cluster(programs, folder, model) as cluster:
            yield cluster
        footprint.assert_gone()
    finally:
        if not os.environ.get("PDMESH_KEEP_CLUSTER_LOGS"):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def api_key(cluster: Cluster) -> str:
    """The namespace and its Secrets are there."""
    cluster.apply(manifest for manifest in render(FOLDER / "overlays/cpu") if manifest["kind"] == "Namespace")
    return cluster.make_secrets()


@pytest.fixture(scope="session")
def mesh(cluster: Cluster, api_key: str) -> Cluster:
    """The cpu overlay, rolled out. Until a test gives it the pools, the autoscaler keeps away, as a person would ask it to."""
    cluster.apply(tuned())
    cluster.plane.kubectl("-n", NAMESPACE, "annotate", "deployment", DECODE, PREFILL, f"{SWITCH}=off")
    for name in MESH:
        cluster.wait_rolled_out(name)
    return cluster


@pytest.fixture(scope="module")
def autoscaler(mesh: Cluster) -> Autoscaler:
    """Two candidates, one of which leads."""
    autoscaler = Autoscaler(mesh)
    autoscaler.begin()
    return autoscaler
