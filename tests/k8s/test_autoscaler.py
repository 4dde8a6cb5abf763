"""The autoscaler's pods: its settings fit those of routers and workers, and its rights are those that it uses, no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.autoscaler.config import AutoscalerConfig, goals_of, objective_of
from pdmesh.autoscaler.kubernetes import external_metrics
from pdmesh.autoscaler.kubernetes.api import open_api
from pdmesh.autoscaler.kubernetes.external_metrics import METRIC
from pdmesh.autoscaler.kubernetes.platform import KubernetesPlatform
from pdmesh.autoscaler.kubernetes.settings import KubernetesSettings
from pdmesh.autoscaler.policy.pool_plan import STUCK_STARTS
from pdmesh.autoscaler.views import PoolDecision, PoolName
from pdmesh.runtime.rpc.certificates import make_certificates
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.worker.config import WorkerConfig
from tests.autoscaler.kubernetes.api_server import ApiServer, api_server
from tests.k8s.kustomize import FOLDER, Manifest, name_of, render
from tests.k8s.meshes import MESHES, SCALED_BY_OTHERS, Workload, of_kind, workloads
from tests.k8s.programs import class_of, config_of, is_below

SCALED = [mesh for mesh in MESHES if mesh != "overlays/gpu-several"]


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
    metrics = {"name": "scrape", "containerPort": config.telemetry.metrics_port}
    assert container["ports"] == [{"name": "grpc", "containerPort": config.port}, metrics]
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
    assert named >= {*config.kubernetes.deployments.values(), config.kubernetes.lease, config.kubernetes.state}
    assert named == {"pdmesh-prefill", "pdmesh-decode", config.kubernetes.lease, config.kubernetes.state}


@pytest.mark.parametrize("mesh", SCALED)
def test_pools_are_those_of_the_roles_that_workers_have(mesh: str, tls: TlsConfig) -> None:
    """A Deployment that it takes for another pool's it would fill, or empty, for the wrong load."""
    config = _own(mesh, tls)[2]
    found: dict[str, set[str]] = {}
    for workload in workloads(mesh):
        for container in workload.containers:
            worker = config_of(workload, container, tls) if class_of(container) is not None else None
            if isinstance(worker, WorkerConfig) and not workload.name.endswith("-green"):
                found.setdefault(workload.name, set()).add(" ".join(sorted(worker.roles)))
    names = {"prefill": PoolName.PREFILL, "decode": PoolName.DECODE, "decode prefill": PoolName.BOTH}
    assert {names[roles]: name for name, (roles,) in found.items()} == config.kubernetes.deployments


@pytest.mark.parametrize("mesh", [mesh for mesh in SCALED if mesh.startswith("overlays/gpu")])
def test_on_gpus_it_has_no_more_than_its_budget(mesh: str, tls: TlsConfig) -> None:
    scaling, pods = _own(mesh, tls)[2].scaling, {each.name: each for each in workloads(mesh)}
    gpus = [each["resources"]["limits"].get("nvidia.com/gpu") for each in pods["pdmesh-decode"].pod["containers"]]
    assert gpus == [str(scaling.both.gpus_per_replica)]
    assert scaling.max_gpus == scaling.both.max_replicas * scaling.both.gpus_per_replica
    probe = pods["pdmesh-decode"].pod["containers"][0]["startupProbe"]
    # Until then a pod may still come, and another in its place would be one too many.
    assert STUCK_STARTS * scaling.both.start_s > probe["periodSeconds"] * probe["failureThreshold"]


def test_where_a_pod_has_several_workers_it_only_watches(tls: TlsConfig) -> None:
    for mesh in MESHES:
        pods = {each.name: each for each in workloads(mesh)}
        num_workers = len(pods["pdmesh-decode"].pod["containers"])
        assert (_own(mesh, tls)[2].platform == "dry-run") == (num_workers > 1) == (mesh not in SCALED)
        assert ("replicas" in pods["pdmesh-decode"].manifest["spec"]) == (num_workers > 1)


def test_every_pod_with_an_autoscaler_is_known_here() -> None:
    for mesh in MESHES:
        programs = [each for workload in workloads(mesh) for each in workload.containers]
        assert sum(class_of(each) is AutoscalerConfig for each in programs) == 1


async def test_its_rights_are_those_that_it_uses(tmp_path: Path) -> None:
    """A life with everything in it against an API server; each request is allowed by one rule, and each right is used."""
    with api_server() as server:
        await _live(server, KubernetesSettings(kubeconfig=server.kubeconfig(tmp_path)))
        assert {_right(method, path) for method, path in server.requests} == _rights("overlays/cpu")


async def test_on_gpus_it_may_do_what_it_has_to_do(tmp_path: Path, tls: TlsConfig) -> None:
    with api_server() as server:
        own = _own("overlays/gpu", tls)[2].kubernetes
        await _live(server, replace(own, kubeconfig=server.kubeconfig(tmp_path)))
        used = {_right(method, path) for method, path in server.requests}
    assert ("apps", "deployments/scale", "pdmesh-decode", "patch") in used
    assert used <= _rights("overlays/gpu")


def _rights(mesh: str) -> set[tuple[str, str, str, str]]:
    rules = next(each for each in of_kind(mesh, "Role"))["rules"]
    return {
        (group, resource, name, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


async def _live(server: ApiServer, told: KubernetesSettings) -> None:
    settings = replace(told, namespace="mesh", retry_period_s=0.1)
    platform = KubernetesPlatform(open_api(settings), "mesh", settings)
    assert await platform.leads(0.0)
    for name in settings.deployments:
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


def _example(folder: str, tls: TlsConfig) -> tuple[dict[tuple[str, str], Manifest], AutoscalerConfig, Manifest]:
    found = {name_of(manifest): manifest for manifest in render(FOLDER / folder)}
    workload = Workload(found["Deployment", "pdmesh-autoscaler"])
    (container,) = workload.containers
    config = config_of(workload, container, tls)
    assert isinstance(config, AutoscalerConfig)
    return found, config, container


@pytest.mark.parametrize("folder", SCALED_BY_OTHERS)
def test_where_others_scale_it_watches_and_shows_what_it_wants(folder: str, tls: TlsConfig) -> None:
    found, config, container = _example(folder, tls)
    assert config.platform == "dry-run" and not config.scaling.flips and config.external_metrics.is_set
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    scraped = ports.pop("scrape")
    assert scraped == config.telemetry.metrics_port
    assert set(ports.values()) == {config.port, config.external_metrics.port, config.external_metrics.json_port} - {None}
    shown = "pdmesh-wanted" if "keda" in folder else "pdmesh-external-metrics"
    service = found["Service", shown]["spec"]
    assert [ports[port["targetPort"]] for port in service["ports"]] == [list(ports.values())[-1]]
    opened = found["NetworkPolicy", shown]["spec"]["ingress"]
    assert [port["port"] for rule in opened for port in rule["ports"]] == [list(ports.values())[-1]]


def test_the_hpas_ask_for_what_is_served(tls: TlsConfig) -> None:
    found, config, container = _example("examples/hpa", tls)
    service = found["APIService", f"v1beta1.{external_metrics.GROUP}"]["spec"]
    assert (service["group"], service["version"]) == (external_metrics.GROUP, external_metrics.VERSION)
    assert ("Service", service["service"]["name"]) in found
    for pool in ("prefill", "decode"):
        spec = found["HorizontalPodAutoscaler", f"pdmesh-{pool}"]["spec"]
        (metric,) = (each["external"] for each in spec["metrics"])
        assert metric["metric"] == {"name": METRIC, "selector": {"matchLabels": {"pool": pool}}}
        assert metric["target"] == {"type": "AverageValue", "averageValue": "1"}
        assert ("Deployment", spec["scaleTargetRef"]["name"]) in found
        assert spec["maxReplicas"] == getattr(config.scaling, pool).max_replicas
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert is_below(config.external_metrics.cert, mounted) and is_below(config.external_metrics.key, mounted)


def test_keda_asks_for_what_is_served(tls: TlsConfig) -> None:
    found, config, _ = _example("examples/keda", tls)
    for pool in ("prefill", "decode"):
        spec = found["ScaledObject", f"pdmesh-{pool}"]["spec"]
        (trigger,) = spec["triggers"]
        port = config.external_metrics.json_port
        assert trigger["metadata"]["url"] == f"http://pdmesh-wanted.pdmesh.svc:{port}/wanted/{pool}"
        assert (trigger["metadata"]["valueLocation"], trigger["metadata"]["targetValue"]) == ("replicas", "1")
        assert ("Deployment", spec["scaleTargetRef"]["name"]) in found
