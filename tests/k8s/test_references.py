"""Objects name each other rightly: labels and selectors, ports, secrets, claims, accounts, rights."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml  # type: ignore[import-untyped]

from tests.k8s.kustomize import FOLDER, Manifest, documents
from tests.k8s.meshes import MESHES, Workload, of_kind, selects, workloads

# What people bring themselves, as docs/kubernetes.md tells them: (kind, name) and the keys that are used.
PROVIDED = {
    ("Secret", "pdmesh-redis"): {"url", "redis.conf"},
    ("Secret", "pdmesh-mesh-secret"): {"secret"},
    ("Secret", "pdmesh-api-keys"): {"keys.json"},
    ("Secret", "pdmesh-loadtest"): {"key"},
    ("Secret", "pdmesh-autoscaler"): {"key"},
    ("Secret", "pdmesh-tls"): {"tls.crt", "tls.key", "ca.crt"},
    ("PersistentVolumeClaim", "pdmesh-models"): set(),
}
WORKLOADS = [(mesh, workload) for mesh in MESHES for workload in workloads(mesh)]
_IDS = [f"{mesh}:{workload.name}" for mesh, workload in WORKLOADS]


def _referred(workload: Workload) -> Iterator[tuple[str, str]]:
    """Kind and name of what a pod needs."""
    yield "ServiceAccount", workload.pod["serviceAccountName"]
    for volume in workload.pod.get("volumes", ()):
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in workload.containers:
        for variable in container.get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                yield "Secret", variable["valueFrom"]["secretKeyRef"]["name"]


@pytest.mark.parametrize(("mesh", "workload"), WORKLOADS, ids=_IDS)
def test_everything_referred_to_is_there_or_to_be_provided(mesh: str, workload: Workload) -> None:
    there = {(kind, each["metadata"]["name"]) for kind in ("ServiceAccount", "ConfigMap") for each in of_kind(mesh, kind)}
    assert set(_referred(workload)) - there - PROVIDED.keys() == set()


def test_the_page_tells_how_to_make_what_is_to_be_provided() -> None:
    page = (FOLDER.parent / "docs/kubernetes.md").read_text(encoding="utf-8")
    for (_, name), keys in PROVIDED.items():
        assert name in page
        assert [key for key in keys if key not in page] == []
    assert not [manifest for mesh in MESHES for manifest in of_kind(mesh, "Secret")]
    used = {reference for _, workload in WORKLOADS for reference in _referred(workload)}
    assert PROVIDED.keys() <= used


@pytest.mark.parametrize(("mesh", "workload"), WORKLOADS, ids=_IDS)
def test_keys_of_secrets_are_those_that_are_provided(mesh: str, workload: Workload) -> None:
    for container in workload.containers:
        for variable in container.get("env", ()):
            if source := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert source["key"] in PROVIDED["Secret", source["name"]]
        for mount in container.get("volumeMounts", ()):
            volume = next(each for each in workload.pod["volumes"] if each["name"] == mount["name"])
            for item in volume.get("secret", {}).get("items", ()):
                assert item["key"] in PROVIDED["Secret", volume["secret"]["secretName"]]


@pytest.mark.parametrize("mesh", MESHES)
def test_each_selector_of_a_deployment_takes_its_pods_and_no_others(mesh: str) -> None:
    for workload in workloads(mesh):
        if workload.manifest["kind"] == "Deployment":
            selected = [each.name for each in workloads(mesh) if selects(workload.manifest["spec"]["selector"], each.labels)]
            assert selected == [workload.name]


@pytest.mark.parametrize("mesh", MESHES)
def test_services_lead_to_ports_of_pods(mesh: str) -> None:
    for service in of_kind(mesh, "Service"):
        chosen = [each for each in workloads(mesh) if selects({"matchLabels": service["spec"]["selector"]}, each.labels)]
        assert chosen, service["metadata"]["name"]
        for workload in chosen:
            names = {name: number for number, name in workload.ports().items()}
            for port in service["spec"]["ports"]:
                assert names[port["targetPort"]] == port["port"]


def test_grpc_services_are_headless() -> None:
    """A virtual address would keep each client's one connection at one pod. One Service is for who cannot balance."""
    for mesh in MESHES:
        headless = {each["metadata"]["name"] for each in of_kind(mesh, "Service") if each["spec"].get("clusterIP") == "None"}
        kinds_of_workers = {each.name for each in workloads(mesh) if each.name in ("pdmesh-prefill", "pdmesh-decode")}
        assert headless == {"pdmesh-router", *kinds_of_workers} >= {"pdmesh-decode"}


@pytest.mark.parametrize("mesh", MESHES)
def test_budgets_keep_all_but_one_of_what_serves(mesh: str) -> None:
    budgets = of_kind(mesh, "PodDisruptionBudget")
    for workload in workloads(mesh):
        chosen = [each for each in budgets if selects(each["spec"]["selector"], workload.labels)]
        serves = ("pdmesh-router", "pdmesh-prefill", "pdmesh-decode", "pdmesh-autoscaler")
        assert len(chosen) == workload.name.startswith(serves)
        assert all(each["spec"]["maxUnavailable"] == 1 for each in chosen)


@pytest.mark.parametrize("mesh", MESHES)
def test_monitors_find_services_and_their_ports(mesh: str) -> None:
    monitors = of_kind(mesh, "ServiceMonitor")
    assert monitors
    for monitor in monitors:
        found = [each for each in of_kind(mesh, "Service") if selects(monitor["spec"]["selector"], each["metadata"]["labels"])]
        assert len(found) == 1
        names = {port["name"] for port in found[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= names


def test_the_autoscaler_may_scale_the_workers_and_little_else() -> None:
    rules = next(each for each in of_kind("overlays/cpu", "Role"))["rules"]
    scaled = {name for rule in rules if rule["resources"] == ["deployments/scale"] for name in rule["resourceNames"]}
    assert scaled == {"pdmesh-prefill", "pdmesh-decode"} <= {each.name for each in workloads("overlays/cpu")}
    open_rules = [rule for rule in rules if "resourceNames" not in rule]
    unnamed = {(resource, verb) for rule in open_rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert unnamed == {("leases", "create"), ("configmaps", "create"), ("events", "create")}
    whole = [rule["verbs"] for rule in rules if rule["resources"] == ["deployments"]]
    assert whole == [["get"]]  # who may patch a Deployment may run anything
    assert not [rule for rule in rules if "*" in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])]


def test_the_binding_joins_role_and_account() -> None:
    (binding,) = of_kind("overlays/cpu", "RoleBinding")
    roles = {each["metadata"]["name"] for each in of_kind("overlays/cpu", "Role")}
    made = [each["metadata"] for each in of_kind("overlays/cpu", "ServiceAccount")]
    accounts = {("ServiceAccount", each["name"], each["namespace"]) for each in made}
    assert binding["roleRef"]["name"] in roles
    assert {(each["kind"], each["name"], each["namespace"]) for each in binding["subjects"]} <= accounts


@pytest.mark.parametrize("name", ["pdmesh-collector", "pdmesh-jaeger"])
def test_who_takes_traces_listens_at_the_ports_that_it_has(name: str) -> None:
    taker = next(each for each in workloads("overlays/tracing") if each.name == name)
    text = next(each for each in of_kind("overlays/tracing", "ConfigMap") if each["metadata"]["name"] == name)["data"]
    listens = {int(port) for port in re.findall(r"0\.0\.0\.0:(\d+)", text["config.yaml"])}
    assert listens == taker.ports().keys() >= {4317}
    assert taker.containers[0]["args"] == [f"--config={taker.containers[0]['volumeMounts'][0]['mountPath']}/config.yaml"]
    settings = yaml.safe_load(text["config.yaml"])
    for pipeline in settings["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= settings[kind].keys()
    assert settings["service"]["extensions"] and set(settings["service"]["extensions"]) == settings["extensions"].keys()


def test_jaeger_keeps_a_bounded_number_of_traces_where_it_looks_for_them() -> None:
    text = next(each for each in of_kind("overlays/tracing", "ConfigMap") if each["metadata"]["name"] == "pdmesh-jaeger")["data"]
    settings = yaml.safe_load(text["config.yaml"])
    ((name, backend),) = settings["extensions"]["jaeger_storage"]["backends"].items()
    assert 0 < backend["memory"]["max_traces"] <= 100_000
    assert settings["extensions"]["jaeger_query"]["storage"]["traces"] == name
    assert settings["exporters"]["jaeger_storage_exporter"]["trace_storage"] == name


def test_grafana_is_told_where_jaeger_shows_traces() -> None:
    (text,) = [each["data"] for each in of_kind("overlays/tracing", "ConfigMap") if "grafana_datasource" in _labels(each)]
    (source,) = yaml.safe_load(text["pdmesh.traces.yaml"])["datasources"]
    service = next(each for each in of_kind("overlays/tracing", "Service") if each["metadata"]["name"] == "pdmesh-jaeger")
    (port,) = [each["port"] for each in service["spec"]["ports"] if each["name"] == "http"]
    assert source["url"] == f"http://pdmesh-jaeger.{service['metadata']['namespace']}:{port}"
    told = (FOLDER / "components/tracing/grafana.yaml").read_text(encoding="utf-8")
    assert f"datasourceUid: {source['uid']}" in told


def _labels(manifest: Manifest) -> dict[str, str]:
    return dict(manifest["metadata"].get("labels", {}))


def test_the_namespace_refuses_what_is_not_restricted() -> None:
    (namespace,) = documents(FOLDER / "base/namespace.yaml")
    labels: Manifest = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
