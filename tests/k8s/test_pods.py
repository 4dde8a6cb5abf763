"""What holds for every pod: rights, resources, room to write, order of importance."""

from __future__ import annotations

import pytest

from tests.k8s.kustomize import Manifest
from tests.k8s.meshes import MESHES, Workload, all_containers, of_kind, workloads
from tests.k8s.programs import environment, is_below, quantity

CONTAINERS = list(all_containers())
_IDS = [f"{mesh}:{workload.name}:{container['name']}" for mesh, workload, container in CONTAINERS]
WORKLOADS = [(mesh, workload) for mesh in MESHES for workload in workloads(mesh)]
_WORKLOAD_IDS = [f"{mesh}:{workload.name}" for mesh, workload in WORKLOADS]
# Where a program writes, by what it runs; a Python program, temporary files at least.
WRITTEN = {
    "router": {"/tmp"},
    "pdmesh.autoscaler": {"/tmp"},
    "prefill_service": {"/tmp"},
    "decode_service": {"/tmp"},
    "redis-server": {"/data"},
}


@pytest.mark.parametrize(("mesh", "workload"), WORKLOADS, ids=_WORKLOAD_IDS)
def test_pods_are_restricted(mesh: str, workload: Workload) -> None:
    """As the profile "restricted" of the pod security standards wants it, and more."""
    context = workload.pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] >= 10_000 and context["runAsGroup"] >= 10_000
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert workload.pod["automountServiceAccountToken"] is (workload.name == "pdmesh-autoscaler")
    assert not workload.pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "nodeName", "shareProcessNamespace"}


@pytest.mark.parametrize(("mesh", "workload"), WORKLOADS, ids=_WORKLOAD_IDS)
def test_volumes_are_of_harmless_kinds_and_all_of_them_are_used(mesh: str, workload: Workload) -> None:
    volumes = {volume["name"]: volume for volume in workload.pod.get("volumes", ())}
    for volume in volumes.values():
        (kind,) = volume.keys() - {"name"}
        assert kind in ("emptyDir", "configMap", "secret", "persistentVolumeClaim")
        assert kind != "emptyDir" or volume["emptyDir"]["sizeLimit"]
    mounted = {mount["name"] for container in workload.containers for mount in container.get("volumeMounts", ())}
    assert mounted == volumes.keys()


@pytest.mark.parametrize(("mesh", "workload", "container"), CONTAINERS, ids=_IDS)
def test_containers_are_restricted(mesh: str, workload: Workload, container: Manifest) -> None:
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert not [port for port in container.get("ports", ()) if "hostPort" in port]


@pytest.mark.parametrize(("mesh", "workload", "container"), CONTAINERS, ids=_IDS)
def test_requests_and_limits_are_set(mesh: str, workload: Workload, container: Manifest) -> None:
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    for resource in ("cpu", "memory"):
        assert 0 < quantity(requests[resource]) <= quantity(limits[resource])
    assert container in workload.pod.get("initContainers", ()) or requests["memory"] == limits["memory"]


@pytest.mark.parametrize(("mesh", "workload", "container"), CONTAINERS, ids=_IDS)
def test_programs_can_write_where_they_have_to_and_nowhere_else(mesh: str, workload: Workload, container: Manifest) -> None:
    empty = {volume["name"] for volume in workload.pod.get("volumes", ()) if "emptyDir" in volume}
    mounts = container.get("volumeMounts", ())
    writable = {mount["mountPath"] for mount in mounts if mount["name"] in empty and not mount.get("readOnly")}
    program = next((word for word in container.get("command", ()) if word in WRITTEN), "")
    needed = WRITTEN.get(program, set()) | ({"/models"} if container["name"] == "model" else set())
    cache = environment(workload, container).get("PDMESH_CACHE")
    assert writable == needed | ({cache} if cache else set())
    assert [mount for mount in mounts if mount["name"] not in empty and not mount.get("readOnly")] == []


@pytest.mark.parametrize(("mesh", "workload"), WORKLOADS, ids=_WORKLOAD_IDS)
def test_service_links_are_off(mesh: str, workload: Workload) -> None:
    """A Service named pdmesh would set PDMESH_PORT, which is a setting of ours."""
    assert workload.pod["enableServiceLinks"] is False


@pytest.mark.parametrize("mesh", MESHES)
def test_priorities_exist_and_put_decode_before_prefill_and_load_tests_last(mesh: str) -> None:
    values = {manifest["metadata"]["name"]: manifest["value"] for manifest in of_kind(mesh, "PriorityClass")}
    used = {workload.name: values[workload.pod["priorityClassName"]] for workload in workloads(mesh)}
    assert used["pdmesh-router"] > used["pdmesh-decode"] > values["pdmesh-prefill"] > 0 > used["pdmesh-loadtest"]
    assert used.get("pdmesh-prefill") in (values["pdmesh-prefill"], None)
    assert set(values) == {"pdmesh-prefill", *(workload.pod["priorityClassName"] for workload in workloads(mesh))}


@pytest.mark.parametrize(("mesh", "workload"), WORKLOADS, ids=_WORKLOAD_IDS)
def test_what_serves_is_replaced_without_a_gap_and_spread(mesh: str, workload: Workload) -> None:
    spec = workload.manifest["spec"]
    if not workload.name.startswith(("pdmesh-router", "pdmesh-prefill", "pdmesh-decode")):
        return
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert spec["minReadySeconds"] > 0
    spread = {each["topologyKey"]: each for each in workload.pod["topologySpreadConstraints"]}
    assert spread.keys() == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    assert all(each["labelSelector"]["matchLabels"].items() <= workload.labels.items() for each in spread.values())


def test_the_model_is_put_where_the_program_looks() -> None:
    """Init containers copy it to a folder below the volume that the program reads."""
    for mesh, workload, container in CONTAINERS:
        if container["name"] != "model":
            continue
        target = next(word for word in " ".join(container["command"]).split() if word.startswith("/models/"))
        programs = [each for each in workload.containers if each is not container]
        read = [value for each in programs for value in environment(workload, each).values() if "/models/" in value]
        assert read and all(value.removeprefix(f"{target.split('/')[-1]}=") == target for value in read), (mesh, workload.name)
        assert is_below(target, ["/models"])
