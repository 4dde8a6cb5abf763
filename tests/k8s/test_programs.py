"""Every flag and variable of every container is one that its program takes, and what it names is there."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pdmesh.autoscaler.config import AutoscalerConfig
from pdmesh.commands import loadtest
from pdmesh.engine.kernels.cpu import build
from pdmesh.engine.loader import hash
from pdmesh.planning import objectives
from pdmesh.runtime.config import FILE_SUFFIX, ConfigError
from pdmesh.runtime.rpc.certificates import make_certificates
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.v1 import decode_pb2, mesh_pb2, prefill_pb2
from pdmesh.worker.config import DecodeConfig, PrefillConfig, WorkerConfig
from router import processes
from router.api.openai import handlers
from router.auth import tenants
from router.config import RouterConfig
from tests.k8s.kustomize import FOLDER, Manifest, merged, parsed
from tests.k8s.meshes import MESHES, Workload, all_containers, manifests, of_kind, workloads
from tests.k8s.programs import OTHER_VARIABLES, class_of, config_of, environment, is_below, options, quantity

OURS = [(mesh, workload, container) for mesh, workload, container in all_containers() if class_of(container) is not None]
# Routers and workers; test_autoscaler.py is about the third.
SERVERS = [
    (mesh, workload, container)
    for mesh, workload, container in OURS
    if workload.manifest["kind"] == "Deployment" and class_of(container) is not AutoscalerConfig
]
_IDS = [f"{mesh}:{container['name']}" for mesh, _, container in OURS]
_SERVER_IDS = [f"{mesh}:{container['name']}" for mesh, _, container in SERVERS]
GRPC_SERVICES = {
    service.full_name for module in (mesh_pb2, prefill_pb2, decode_pb2) for service in module.DESCRIPTOR.services_by_name.values()
}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    """What the Secret pdmesh-tls would hold."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "made", days=30)


def _mounts(container: Manifest) -> list[str]:
    return [mount["mountPath"] for mount in container.get("volumeMounts", ())]


def test_each_mesh_has_routers_and_workers_for_both_roles(tls: TlsConfig) -> None:
    for mesh in MESHES:
        programs = {class_of(container) for of, _, container in OURS if of == mesh}
        assert programs - {PrefillConfig} == {RouterConfig, AutoscalerConfig, DecodeConfig, loadtest.Options}
        configs = [config_of(workload, container, tls) for of, workload, container in SERVERS if of == mesh]
        workers = [config for config in configs if isinstance(config, WorkerConfig)]
        assert {role for config in workers for role in config.roles} == {"prefill", "decode"}
        # The hand-off between GPUs is untried: who prefills there does it for itself.
        assert all(len(config.roles) == 1 for config in workers) == all(config.engine.device == "cpu" for config in workers)


@pytest.mark.parametrize(("mesh", "workload", "container"), OURS, ids=_IDS)
def test_its_program_takes_all_of_it(mesh: str, workload: Workload, container: Manifest, tls: TlsConfig) -> None:
    config_of(workload, container, tls)
    known = options(container)
    names = {variable["name"] for variable in container.get("env", ())}
    files = {f"{name}{FILE_SUFFIX}" for name, option in known.items() if option.secret}
    assert {name for name in names if name.startswith("PDMESH_")} <= known.keys() | files | OTHER_VARIABLES


@pytest.mark.parametrize(("mesh", "workload", "container"), OURS, ids=_IDS)
def test_secrets_are_files_but_for_the_one_that_may_be_missing(mesh: str, workload: Workload, container: Manifest) -> None:
    given = [
        each["valueFrom"]["secretKeyRef"] for each in container.get("env", ()) if "secretKeyRef" in each.get("valueFrom", {})
    ]
    assert [each["name"] for each in given if not each.get("optional")] == []


@pytest.mark.parametrize(("mesh", "workload", "container"), OURS, ids=_IDS)
def test_nothing_is_set_twice_and_no_secret_is_a_flag(mesh: str, workload: Workload, container: Manifest) -> None:
    """A flag wins over a variable: an overlay that sets it would change nothing."""
    known = options(container)
    flags = {argument.partition("=")[0] for argument in container["args"]}
    set_twice = {option.flag for name, option in known.items() if name in environment(workload, container)} & flags
    assert set_twice == set()
    paths = {"--api-keys"}  # a file here, which is none
    assert {option.flag for option in known.values() if option.secret} & flags <= paths


def test_the_page_gives_workers_a_disk_that_their_program_takes(tls: TlsConfig) -> None:
    """The patch of docs/kubernetes_operation.md on the base's Deployments: the volume is where KV goes, and has room for it."""
    page = (FOLDER.parent / "docs/kubernetes_operation.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "PDMESH_KV_DISK" in block)
    (patch,) = parsed(block)
    (deployment,) = (each.manifest for each in workloads("overlays/cpu") if each.name == patch["metadata"]["name"])
    workload = Workload(merged(deployment, patch))
    (container,) = (each for each in workload.containers if class_of(each) is DecodeConfig)
    config = config_of(workload, container, tls)
    assert isinstance(config, DecodeConfig)
    (volume,) = (each for each in workload.pod["volumes"] if each["name"] == "kv-disk")
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "kv-disk")
    assert config.tiers.kv_disk == mount["mountPath"] and not mount.get("readOnly")
    size = quantity(volume["emptyDir"]["sizeLimit"])
    assert config.tiers.kv_disk_gb * 1e9 < size <= quantity(container["resources"]["requests"]["ephemeral-storage"])
    assert workload.pod["securityContext"]["fsGroup"] == workload.pod["securityContext"]["runAsGroup"]


def _cpu_workers() -> list[tuple[str, Workload, Manifest]]:
    found = [(mesh, workload, each) for mesh, workload, each in SERVERS if class_of(each) in (DecodeConfig, PrefillConfig)]
    return [each for each in found if environment(each[1], each[2]).get("PDMESH_DEVICE", "cpu") == "cpu"]


def _check_room_for_packed_weights(workload: Workload, container: Manifest, tls: TlsConfig) -> None:
    """The weights that the pod's memory admits, beside KV and a gigabyte, fit in the cache, and the cache in its volume."""
    config = config_of(workload, container, tls)
    assert isinstance(config, WorkerConfig)
    cache_bytes = float(config.engine.packed_cache) * 1e9
    weights = quantity(container["resources"]["limits"]["memory"]) - (config.engine.kv_memory_mb + 1024) * 2**20
    (mount,) = (
        each for each in container["volumeMounts"] if each["mountPath"] == environment(workload, container)["PDMESH_CACHE"]
    )
    (volume,) = (each for each in workload.pod["volumes"] if each["name"] == mount["name"])
    assert 0 < weights <= cache_bytes <= 0.95 * quantity(volume["emptyDir"]["sizeLimit"])


@pytest.mark.parametrize(
    ("mesh", "workload", "container"), _cpu_workers(), ids=[f"{mesh}:{each['name']}" for mesh, _, each in _cpu_workers()]
)
def test_the_cache_holds_the_packed_weights_that_fit_in_memory(
    mesh: str, workload: Workload, container: Manifest, tls: TlsConfig
) -> None:
    _check_room_for_packed_weights(workload, container, tls)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_base_holds_the_packed_weights_of_a_billion(kind: str) -> None:
    """TinyLlama-1.1B in int8: benchmarks/results/cpu.json has its size."""
    (workload,) = (Workload(each) for each in parsed((FOLDER / f"base/workers/{kind}/{kind}.yaml").read_text()))
    (container,) = workload.containers
    (packed,) = (each["value"] for each in container["env"] if each["name"] == "PDMESH_PACKED_CACHE")
    figures = json.loads((FOLDER.parent / "benchmarks/results/cpu.json").read_text())["figures"]
    (size_mb,) = (each["value"] for each in figures if each["name"] == "memory: TinyLlama-1.1B int8: packed weights")
    assert float(packed) * 1000 > size_mb


def test_the_page_gives_workers_a_cache_for_a_larger_model(tls: TlsConfig) -> None:
    page = (FOLDER.parent / "docs/kubernetes_operation.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "PDMESH_PACKED_CACHE" in block)
    (patch,) = parsed(block)
    (deployment,) = (each.manifest for each in workloads("overlays/cpu") if each.name == patch["metadata"]["name"])
    workload = Workload(merged(deployment, patch))
    (container,) = (each for each in workload.containers if class_of(each) is DecodeConfig)
    _check_room_for_packed_weights(workload, container, tls)
    (volume,) = (each for each in workload.pod["volumes"] if each["name"] == "cache")
    assert quantity(volume["emptyDir"]["sizeLimit"]) <= quantity(container["resources"]["requests"]["ephemeral-storage"])


def test_a_flag_that_no_program_has_is_found(tls: TlsConfig) -> None:
    _, workload, container = SERVERS[0]
    with pytest.raises(ConfigError, match="--drain-grace"):
        config_of(workload, {**container, "args": ["--drain-grace=1"]}, tls)


@pytest.mark.parametrize(("mesh", "workload", "container"), SERVERS, ids=_SERVER_IDS)
def test_ports_and_files_are_those_of_the_program(mesh: str, workload: Workload, container: Manifest, tls: TlsConfig) -> None:
    config = config_of(workload, container, tls)
    ports = [port["containerPort"] for port in container["ports"]]
    is_router = isinstance(config, RouterConfig)
    served = [config.port, config.http_port] if isinstance(config, RouterConfig) else [config.port, config.transfer_port]
    assert set(ports) == {*served, *_metrics_ports(config)} and len(ports) == len(set(ports))
    read = [config.api_keys, config.tenants, config.objectives, *config.model_folders().values()] if is_router else []
    read += [config.engine.model] if isinstance(config, WorkerConfig) else []
    given = environment(workload, container)
    read += [path for name, path in given.items() if name.startswith("PDMESH_TLS_") and path.startswith("/")]
    assert [path for path in read if not is_below(path, _mounts(container))] == []
    assert config.host == "0.0.0.0"
    assert config.redis.startswith("redis://")


def _metrics_ports(config: RouterConfig | WorkerConfig) -> list[int]:
    """One of each process."""
    first = config.telemetry.metrics_port
    assert first
    return [first + number for number in range(config.processes if isinstance(config, RouterConfig) else 1)]


@pytest.mark.parametrize("mesh", MESHES)
def test_routers_and_workers_mean_the_same_mesh_and_models(mesh: str, tls: TlsConfig) -> None:
    configs = [config_of(workload, container, tls) for of, workload, container in SERVERS if of == mesh]
    routers = [config for config in configs if isinstance(config, RouterConfig)]
    workers = [config for config in configs if isinstance(config, WorkerConfig)]
    assert len({config.mesh for config in configs}) == 1
    assert len({config.tls.is_set for config in configs}) == 1
    served = {(config.served_name, config.engine.model) for config in workers}
    assert {frozenset(config.model_folders().items()) for config in routers} == {frozenset(served)}


@pytest.mark.parametrize("mesh", MESHES)
def test_workers_of_a_pod_have_names_and_ports_of_their_own(mesh: str, tls: TlsConfig) -> None:
    for workload in workloads(mesh):
        inside = [each for each in workload.containers if class_of(each) is not None and workload.name != "pdmesh-loadtest"]
        configs = [config_of(workload, container, tls) for container in inside]
        workers = [config for config in configs if isinstance(config, WorkerConfig)]
        assert len({config.worker_id for config in workers}) == len(workers)
        assert all(config.advertise for config in workers)
        ports = [port for config in workers for port in (config.port, config.transfer_port, *_metrics_ports(config))]
        assert len(set(ports)) == len(ports)


@pytest.mark.parametrize(("mesh", "workload", "container"), SERVERS, ids=_SERVER_IDS)
def test_a_pod_is_given_the_time_that_its_drain_takes(mesh: str, workload: Workload, container: Manifest, tls: TlsConfig) -> None:
    config = config_of(workload, container, tls)
    before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert before[0] == "sleep"
    needed_s = float(before[1]) + config.drain_grace_s
    needed_s += config.linger_s + processes.STOP_MARGIN_S if isinstance(config, RouterConfig) else 5.0
    assert workload.pod["terminationGracePeriodSeconds"] > needed_s


@pytest.mark.parametrize(("mesh", "workload", "container"), SERVERS, ids=_SERVER_IDS)
def test_probes_ask_what_the_program_answers(mesh: str, workload: Workload, container: Manifest, tls: TlsConfig) -> None:
    config = config_of(workload, container, tls)
    names = {port["name"]: port["containerPort"] for port in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        (way,) = probe.keys() & {"grpc", "httpGet", "tcpSocket", "exec"}
        port = names.get(probe[way]["port"], probe[way]["port"])
        assert port == (config.http_port if way == "httpGet" else config.port)
        if way == "grpc":
            assert not config.tls.is_set  # the kubelet would not get through
            assert probe["grpc"].get("service", "pdmesh.v1.Mesh") in GRPC_SERVICES
        if way == "httpGet":
            assert f'"{probe[way]["path"]}"' in inspect.getsource(handlers.routes)
            assert (probe[way].get("scheme") == "HTTPS") == config.tls.is_set
            assert not config.tls.is_set or config.tls_client_auth == "none"  # the kubelet shows no certificate
    assert isinstance(config, WorkerConfig) or "grpc" not in container["livenessProbe"]  # not ready is not dead


@pytest.mark.parametrize("mesh", MESHES)
def test_every_process_sends_its_traces_to_the_store_that_there_is(mesh: str, tls: TlsConfig) -> None:
    """Or none does: without a store nothing is sent."""
    takers = {each["metadata"]["name"]: each["spec"] for each in of_kind(mesh, "Service")}
    endpoints = {
        config_of(workload, container, tls).telemetry.endpoint({})
        for of, workload, container in OURS
        if of == mesh and workload.manifest["kind"] == "Deployment"
    }
    if "pdmesh-jaeger" not in takers:
        assert endpoints == {None}
        return
    (endpoint,) = endpoints
    assert endpoint is not None and not endpoint.encrypted
    name, _, port = endpoint.target.partition(":")
    assert int(port) in {each["port"] for each in takers[name]["ports"]}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_router_is_ready_only_with_a_worker(mesh: str) -> None:
    """By gRPC's health or by HTTP's /health/ready: both follow the streams to workers."""
    for of, workload, container in SERVERS:
        if of == mesh and workload.name == "pdmesh-router":
            probe = container["readinessProbe"]
            assert probe.get("grpc", {}).get("service") == "pdmesh.v1.Mesh" or probe["httpGet"]["path"] == "/health/ready"


@pytest.mark.parametrize("mesh", MESHES)
def test_memory_for_kv_is_within_the_limit_and_threads_within_the_quota(mesh: str, tls: TlsConfig) -> None:
    for of, workload, container in SERVERS:
        config = config_of(workload, container, tls)
        if of != mesh or not isinstance(config, WorkerConfig):
            continue
        limits = container["resources"]["limits"]
        assert 1 <= config.engine.num_threads < float(limits["cpu"])
        assert (config.engine.kv_memory_mb + 1024) * 2**20 < quantity(limits["memory"])
        assert (config.engine.device == "cuda") == ("nvidia.com/gpu" in limits)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_files_in_config_maps_are_good(mesh: str, tls: TlsConfig, tmp_path: Path) -> None:
    data: dict[str, Any] = {manifest["metadata"]["name"]: manifest["data"] for manifest in of_kind(mesh, "ConfigMap")}
    limits = tenants.parse(tomllib.loads(data["pdmesh-tenants"]["tenants.toml"]))
    assert limits.limits_of("search").weight == 4.0
    path = tmp_path / "objectives.toml"
    path.write_text(data["pdmesh-objectives"]["objectives.toml"])
    router = next(config_of(workload, container, tls) for of, workload, container in SERVERS if of == mesh)
    assert isinstance(router, RouterConfig)
    assert {goal.model for goal in objectives.load(str(path))} == router.model_folders().keys()


def test_variables_beside_the_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_CACHE", "/var/cache/pdmesh")
    assert hash.cache_folder() == Path("/var/cache/pdmesh")
    assert '"PDMESH_KERNELS_DIR"' in inspect.getsource(build)
    given = {name for _, workload, container in OURS for name in environment(workload, container)}
    assert {name for name in given if not name.startswith("PDMESH_")} == {"POD_NAME"}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_load_test_aims_at_the_routers(mesh: str, tls: TlsConfig) -> None:
    job = next(workload for workload in workloads(mesh) if workload.name == "pdmesh-loadtest")
    host, _, port = config_of(job, job.containers[0], tls).target.partition(":")
    services = {manifest["metadata"]["name"]: manifest["spec"] for manifest in manifests(mesh) if manifest["kind"] == "Service"}
    assert int(port) in {each["port"] for each in services[host]["ports"]}


@pytest.mark.parametrize(("mesh", "workload", "container"), SERVERS, ids=_SERVER_IDS)
def test_what_prometheus_looks_for_are_the_ports_of_metrics(
    mesh: str, workload: Workload, container: Manifest, tls: TlsConfig
) -> None:
    """By their names, in scrape.yaml."""
    config = config_of(workload, container, tls)
    assert isinstance(config, RouterConfig | WorkerConfig)
    (scrape,) = [each for each in of_kind(mesh, "ConfigMap") if each["metadata"]["name"] == "pdmesh-prometheus-scrape"]
    assert "regex: pdmesh;scrape.*" in scrape["data"]["pdmesh.scrape.yaml"]
    found = [port["containerPort"] for port in container["ports"] if port["name"].startswith("scrape")]
    assert found == _metrics_ports(config) and workload.labels["app.kubernetes.io/part-of"] == "pdmesh"
