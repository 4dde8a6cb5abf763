"""The autoscaler's pods: its settings fit those of routers and workers, and its rights are those that it uses, no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.config import AutoscalerConfig, goals_of, objective_of
from autoscaler.decision import PoolDecision
from autoscaler.kubernetes.api import open_api
from autoscaler.kubernetes.platform import KubernetesPlatform
from autoscaler.kubernetes.settings import KubernetesSettings
from autoscaler.views import PoolName
from pdmesh.certificates import make_certificates
from runtime.tls import TlsConfig
from tests.autoscaler.kubernetes.api_server import ApiServer, api_server
from tests.k8s.kustomize import Manifest
from tests.k8s.meshes import MESHES, Workload, of_kind, workloads
from tests.k8s.programs import class_of, config_of, is_below

SCALED = [mesh for mesh in MESHES if not mesh.startswith("overlays/gpu")]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    """What the Secret pdmesh-tls would hold."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "made", days=30)


def _own(mesh: str, tls: TlsConfig) -> tuple[Workload, Manifest, AutoscalerConfig]:
    workload = next(each for each in workloads(mesh) if each.name == "pdmesh-autoscaler")
    (container,) = workload.containers
    config = config_of(workload, container, tls)
    assert isinstance(config, AutoscalerConfig)
    return workload, container, config


@pytest.mark.parametrize("mesh", MESHES)
def test_it_asks_the_routers_and_keeps_their_objectives(mesh: str, tls: TlsConfig, tmp_path: Path) -> None:
    workload, container, config = _own(mesh, tls)
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(mesh, "Service")}
    for router in config.routers:
        host, _, port = router.partition(":")
        assert services[host]["clusterIP"] == "None"  # a name that stands for every router
        assert int(port) in {each["port"] for each in services[host]["ports"]}
    data = next(each["data"] for each in of_kind(mesh, "ConfigMap") if each["metadata"]["name"] == "pdmesh-objectives")
    path = tmp_path / Path(config.objectives).name
    path.write_text(data[path.name])
    goals_of(objective_of(str(path), config.model), config.transit_ms)
    assert is_below(config.objectives, [mount["mountPath"] for mount in container["volumeMounts"]])
    assert config.tls.is_set == any("PDMESH_TLS_CERT" in each["name"] for each in container["env"])
    assert workload.manifest["spec"]["replicas"] == 2


@pytest.mark.parametrize("mesh", MESHES)
def test_its_probes_ask_for_the_health_of_its_port(mesh: str, tls: TlsConfig) -> None:
    _, container, config = _own(mesh, tls)
    assert container["ports"] == [{"name": "grpc", "containerPort": config.port}]
    assert config.host == "0.0.0.0"
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        way = "tcpSocket" if config.tls.is_set else "grpc"  # the kubelet's gRPC probes speak no TLS
        assert container[kind].keys() & {"grpc", "tcpSocket"} == {way}
        assert container[kind][way]["port"] in ("grpc", config.port)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_pod_is_given_the_time_to_free_its_lease(mesh: str, tls: TlsConfig) -> None:
    workload, _, config = _own(mesh, tls)
    assert workload.pod["terminationGracePeriodSeconds"] > 4 * config.kubernetes.request_timeout_s + 5


@pytest.mark.parametrize("mesh", SCALED)
def test_what_it_scales_is_there_and_has_no_number_that_each_apply_would_bring_back(mesh: str, tls: TlsConfig) -> None:
    _, _, config = _own(mesh, tls)
    assert config.platform == "kubernetes" and config.kubernetes.own_namespace() == "pdmesh"
    scaled = {each.name: each for each in workloads(mesh)}
    for name in config.kubernetes.deployments.values():
        assert "replicas" not in scaled[name].manifest["spec"]
    rules = next(each for each in of_kind(mesh, "Role"))["rules"]
    named = {name for rule in rules for name in rule.get("resourceNames", ())}
    assert named == {*config.kubernetes.deployments.values(), config.kubernetes.lease, config.kubernetes.state}


def test_on_gpus_it_only_watches(tls: TlsConfig) -> None:
    for mesh in MESHES.keys() - set(SCALED):
        assert _own(mesh, tls)[2].platform == "dry-run"


def test_every_replica_that_it_may_ask_for_fits_what_is_said_of_prices_and_limits(tls: TlsConfig) -> None:
    for mesh in SCALED:
        _, _, config = _own(mesh, tls)
        assert config.scaling.prefill.max_replicas <= 8 and config.scaling.decode.max_replicas <= 8


def test_every_pod_with_an_autoscaler_is_known_here() -> None:
    for mesh in MESHES:
        programs = [each for workload in workloads(mesh) for each in workload.containers]
        assert sum(class_of(each) is AutoscalerConfig for each in programs) == 1


async def test_its_rights_are_those_that_it_uses(tmp_path: Path) -> None:
    """A life with everything in it against an API server; each request is allowed by one rule, and each right is used."""
    rules = next(each for each in of_kind("overlays/cpu", "Role"))["rules"]
    rights = {
        (group, resource, name, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }
    with api_server() as server:
        await _live(server, tmp_path)
        used = {_right(method, path) for method, path in server.requests}
    assert used == rights


async def _live(server: ApiServer, folder: Path) -> None:
    settings = KubernetesSettings(namespace="mesh", kubeconfig=server.kubeconfig(folder), retry_period_s=0.1)
    platform = KubernetesPlatform(open_api(settings), "mesh", settings)
    assert await platform.leads(0.0)
    for name in (PoolName.PREFILL, PoolName.DECODE):
        await platform.observe(0.0)
        await platform.scale(PoolDecision(name, 2, 3, "why"), 3, 0.0)
    await platform.save({"a": 1})
    await platform.save({"a": 2})
    await platform.load()
    await platform.close()


def _right(method: str, path: str) -> tuple[str, str, str, str]:
    """API group, resource, name (none where something is made), verb."""
    prefix, _, rest = path.partition("/namespaces/mesh/")
    parts = prefix.strip("/").split("/")
    resource, _, name = rest.partition("/")
    name, _, part = name.partition("/")
    verb = {"GET": "get", "POST": "create", "PATCH": "patch"}[method]
    return (parts[1] if parts[0] == "apis" else "", f"{resource}/{part}" if part else resource, name, verb)
