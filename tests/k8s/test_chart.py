"""The chart: the same objects as the kustomizations, values that are checked, any name and any version of the API server."""

from __future__ import annotations

import base64
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pdmesh.cli import command_of
from pdmesh.runtime.config import ENV_PREFIX, options_of
from pdmesh.runtime.rpc.mesh_secret import read_secrets
from router.auth.api_keys import read_key_file
from tests.k8s.charts import CHART, SAME, helm, in_namespace, templated
from tests.k8s.kustomize import (
    FOLDER,
    Manifest,
    containers_of,
    documents,
    name_of,
    ordered,
    parsed,
    pod_of,
    render,
)
from tests.k8s.tools import HELM
from tools.kustomizations import contents

# What has a name of its own, whatever the release's.
NAMED = r"pdmesh-(dashboard-.*|prometheus-rules|grafana-provisioning)|v1beta1\.external\.metrics\.k8s\.io"
pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed: make .venv/bin/helm, or https://helm.sh")


def chart(*examples: str, values: tuple[str, ...] = (), release: str = "pdmesh", version: str = "1.34.0") -> list[Manifest]:
    """The objects of a release in the namespace pdmesh."""
    printed = templated(*examples, values=("secrets.create=false", *values), release=release, version=version)
    found = in_namespace(parsed(printed))
    assert len({name_of(manifest) for manifest in found}) == len(found)
    return found


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Any]:
    """Objects, with objectives as what they say."""
    found = {name_of(manifest): ordered(manifest) for manifest in manifests}
    for (kind, name), manifest in found.items():
        if kind == "ConfigMap" and name.endswith("-objectives"):
            manifest["data"] = tomllib.loads(manifest["data"]["objectives.toml"])
    return found


@pytest.mark.parametrize("folder", SAME)
def test_it_is_what_the_kustomization_is(folder: str) -> None:
    theirs = by_name(render(FOLDER / folder))
    del theirs["Namespace", "pdmesh"]  # helm's --create-namespace
    ours = by_name(chart(*SAME[folder]))
    assert ours.keys() == theirs.keys()
    for name, manifest in ours.items():
        assert manifest == theirs[name], name


def test_a_second_pool_is_what_the_kustomization_is() -> None:
    theirs = by_name(render(FOLDER / "overlays/cpu/green"))
    ours = by_name(chart("green"))
    assert {name: ours[name] for name in theirs} == theirs
    assert ours.keys() - theirs.keys() == by_name(chart()).keys()


def test_monitors_of_the_operator_are_those_of_the_component() -> None:
    (monitor,) = render(FOLDER / "components/service-monitor")
    assert by_name(chart(values=("telemetry.serviceMonitor=true",)))["ServiceMonitor", "pdmesh-collector"] == ordered(monitor)


@pytest.mark.parametrize("examples", sorted(set(SAME.values())), ids="+".join)
def test_helm_finds_nothing_to_say(examples: tuple[str, ...]) -> None:
    files = [part for name in examples for part in ("-f", str(CHART / f"examples/{name}.yaml"))]
    helm("lint", "--strict", str(CHART), *files)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("router.replica=1", "/router"),
        ("router.replicas=0", "/router/replicas"),
        ("prefill.replicas=-1", "/prefill/replicas"),
        ("decode.enabled=false", "/decode/enabled"),
        ("decode.env.lower=1", "/decode/env"),
        ("decode.env.PDMESH_CACHE=/tmp", "/decode/env/PDMESH_CACHE"),  # would be there twice
        ("autoscaler.minReplicas=0", "/autoscaler/minReplicas"),
        ("autoscaler.scaling=vpa", "/autoscaler/scaling"),
        ("pools.blue.decode.replicas=1", "/pools/blue"),
        ("pools.green.decod.replicas=1", "/pools/green"),
        ("model.size=1GB", "/model/size"),
        ("images.worker.digest=abc", "/images/worker/digest"),
        ("objectives.smollm2.ttft_ms=0", "/objectives/smollm2"),
        ("tls.clientAuth=maybe", "/tls/clientAuth"),
        ("tracing.endpoint=http://jaeger", "/tracing/endpoint"),
        ("gateway.failureMode=fail", "/gateway/failureMode"),
        ("gateway.env.PDMESH_POOL=a/b", "/gateway/env/PDMESH_POOL"),
        ("routers.replicas=1", "routers"),
        ("router.env.PDMESH_METRICS_PORT=9000", "/router/env/PDMESH_METRICS_PORT"),  # the ports of pods and policies stay
        ("router.env.PDMESH_PROCESSES=2", "/router/env/PDMESH_PROCESSES"),
        ("telemetry.namespace=", "/telemetry/namespace"),  # would open ports to every namespace
    ],
)
def test_a_wrong_value_is_refused_by_name(value: str, named: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(named)):
        chart(values=(value,))


def test_external_metrics_that_cannot_be_verified_are_refused() -> None:
    values = ("autoscaler.scaling=hpa", "autoscaler.externalMetrics.certManager=false")
    with pytest.raises(RuntimeError, match=r"autoscaler\.externalMetrics\.caBundle: is empty"):
        chart(values=values)
    assert by_name(chart(values=(*values, "autoscaler.externalMetrics.caBundle=YQ==")))


@pytest.mark.parametrize(
    ("values", "deadline_s"), [((), 1200), (("decode.startupS=1200",), 1800), (("pools.green.decode.startupS=3600",), 5400)]
)
def test_routers_have_as_long_as_the_models_take_to_load(values: tuple[str, ...], deadline_s: int) -> None:
    found = by_name(chart(values=values))
    assert found["Deployment", "pdmesh-router"]["spec"]["progressDeadlineSeconds"] == deadline_s


def test_more_workers_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"autoscaler\.minReplicas: is more than maxReplicas"):
        chart(values=("autoscaler.minReplicas=5",))


@pytest.mark.parametrize(
    ("value", "named"), [("tls.enabled=true", "tls.enabled"), ("decode.env.PDMESH_ROLES=prefill", "decode.env.PDMESH_ROLES")]
)
def test_what_a_gateway_cannot_have_is_refused(value: str, named: str) -> None:
    with pytest.raises(RuntimeError, match=rf"gateway\.enabled: .*{re.escape(named)}"):
        chart("gateway", values=(value,))


def test_cert_manager_needs_an_issuer() -> None:
    values = ("tls.enabled=true", "tls.certManager.enabled=true")
    with pytest.raises(RuntimeError, match=r"tls\.certManager\.issuer: name the Issuer"):
        chart(values=values)
    found = by_name(chart(values=(*values, "tls.certManager.issuer=ours")))
    assert found["Certificate", "pdmesh-tls"]["spec"]["secretName"] == "pdmesh-tls"
    assert "pdmesh" in found["Certificate", "pdmesh-tls"]["spec"]["dnsNames"]


def test_another_release_has_names_of_its_own_that_refer_to_each_other() -> None:
    examples = ("tracing", "green", "hpa")
    ours, other = chart(*examples), chart(*examples, release="blue-whale")
    assert {
        (kind, re.sub("^pdmesh-", "blue-whale-", name)) for kind, name in map(name_of, ours) if not re.fullmatch(NAMED, name)
    } == {name_of(manifest) for manifest in other if not re.fullmatch(NAMED, name_of(manifest)[1])}
    settings = by_name(other)["Deployment", "blue-whale-autoscaler"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PDMESH_KUBERNETES_PREFILL_DEPLOYMENT", "value": "blue-whale-prefill"} in settings
    accounts = {name for kind, name in map(name_of, other) if kind == "ServiceAccount"}
    for manifest in other:
        if (pod := pod_of(manifest)) is not None:
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert pod["serviceAccountName"] in accounts and pod["priorityClassName"].startswith("blue-whale-")


def test_an_older_api_server_gets_what_it_knows() -> None:
    found = chart("hpa", version="1.20.2")
    assert {each["apiVersion"] for each in found if each["kind"] == "HorizontalPodAutoscaler"} == {"autoscaling/v2beta2"}
    assert {manifest["apiVersion"] for manifest in found if manifest["kind"] == "PodDisruptionBudget"} == {"policy/v1beta1"}
    probes = [
        probe
        for manifest in found
        for container in containers_of(manifest)
        for key, probe in container.items()
        if key.endswith("Probe")
    ]
    assert probes and not [probe for probe in probes if "grpc" in probe]


def test_where_nothing_scales_replicas_are_those_of_the_values() -> None:
    for values in (("autoscaler.enabled=false",), ("autoscaler.scaling=watch",)):
        found = by_name(chart(values=(*values, "prefill.replicas=3")))
        assert found["Deployment", "pdmesh-prefill"]["spec"]["replicas"] == 3
    assert not [name for name in by_name(chart(values=("autoscaler.enabled=false",))) if name[1] == "pdmesh-autoscaler"]


def test_a_further_pool_has_replicas_and_an_image_of_its_own() -> None:
    digest = f"sha256:{'0' * 64}"
    values = (f"images.worker.digest={digest}", "pools.green.worker.tag=0.2.0", "pools.green.decode.replicas=4")
    green = by_name(chart(values=values))["Deployment", "pdmesh-decode-green"]["spec"]
    assert green["replicas"] == 4
    assert green["template"]["spec"]["containers"][0]["image"] == "pdmesh-worker-cpu:0.2.0"


def test_a_second_mesh_uses_the_priorities_of_the_first() -> None:
    values = ("priorityClasses.create=false", "priorityClasses.name=pdmesh")
    found = by_name(chart(values=values, release="other"))
    assert not [name for kind, name in found if kind == "PriorityClass"]
    assert found["Deployment", "other-router"]["spec"]["template"]["spec"]["priorityClassName"] == "pdmesh-front"


def test_without_prefill_workers_the_others_have_both_roles() -> None:
    found = by_name(chart("keda", values=("prefill.enabled=false",)))
    settings = found["Deployment", "pdmesh-decode"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PDMESH_ROLES", "value": "prefill,decode"} in settings
    assert found["ScaledObject", "pdmesh-decode"]["spec"]["triggers"][0]["metadata"]["url"].endswith("/wanted/both")
    assert ("ScaledObject", "pdmesh-prefill") not in found


def test_a_redis_and_a_store_of_traces_of_your_own() -> None:
    found = by_name(chart(values=("redis.enabled=false", "tracing.enabled=true", "tracing.endpoint=tempo.monitoring:4317")))
    assert not [name for name in found if "redis" in name[1] or "jaeger" in name[1]]
    settings = found["Deployment", "pdmesh-decode"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PDMESH_OTLP_ENDPOINT", "value": "tempo.monitoring:4317"} in settings
    for sender in ("router", "worker", "autoscaler"):
        (rule,) = found["NetworkPolicy", f"pdmesh-{sender}-to-traces"]["spec"]["egress"]
        assert rule["ports"] == [{"port": 4317, "protocol": "TCP"}]


def test_secrets_are_those_that_the_programs_take(tmp_path: Path) -> None:
    found = by_name(chart(values=("secrets.create=true",)))
    content = {
        name: {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
        for (kind, name), secret in found.items()
        if kind == "Secret"
    }
    assert content.keys() == {"pdmesh-redis", "pdmesh-mesh-secret", "pdmesh-api-keys", "pdmesh-client-key", "pdmesh-autoscaler"}
    (tmp_path / "keys.json").write_text(content["pdmesh-api-keys"]["keys.json"])
    keys = read_key_file(tmp_path / "keys.json")
    for name, of_secret in (("first", "pdmesh-client-key"), ("autoscaler", "pdmesh-autoscaler")):
        record = keys.find(content[of_secret]["key"])
        assert record is not None and record.name == name and record.admin
    (tmp_path / "secret").write_text(content["pdmesh-mesh-secret"]["secret"])
    assert len(read_secrets(str(tmp_path / "secret"))) == 1
    password = content["pdmesh-redis"]["redis.conf"].removeprefix("requirepass ")
    assert content["pdmesh-redis"]["url"] == f"redis://:{password}@pdmesh-redis:6379/0"
    again = by_name(chart(values=("secrets.create=true",)))
    assert found["Secret", "pdmesh-client-key"] != again["Secret", "pdmesh-client-key"]


def test_the_client_of_helm_test_has_flags_that_its_program_knows() -> None:
    pod = by_name(chart(values=("secrets.create=true", "tls.enabled=true")))["Pod", "pdmesh-test"]
    (container,) = pod["spec"]["containers"]
    assert container["command"][:2] == ["pdmesh", "generate"]
    known = {option.flag for option in options_of(command_of(["generate"]).Options, ENV_PREFIX)}
    assert {argument.partition("=")[0] for argument in container["args"]} <= known
    assert pod["metadata"]["labels"]["pdmesh-client"] == "true"  # network policies let it talk to routers


def test_only_secrets_without_a_name_are_made() -> None:
    values = ("secrets.create=true", "secrets.redis=ours", "secrets.apiKeys=keys", "secrets.autoscaler=key")
    found = by_name(chart(values=values))
    assert {name for kind, name in found if kind == "Secret"} == {"pdmesh-mesh-secret"}
    volumes = {each["name"]: each for each in found["Deployment", "pdmesh-router"]["spec"]["template"]["spec"]["volumes"]}
    assert (volumes["redis"]["secret"]["secretName"], volumes["api-keys"]["secret"]["secretName"]) == ("ours", "keys")
    with pytest.raises(RuntimeError, match="name both, or neither"):
        chart(values=("secrets.create=true", "secrets.apiKeys=keys"))


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    (values,) = documents(CHART / "values.yaml")
    assert values.keys() == schema["properties"].keys() - {"global"}
    for name, value in values.items():
        known = schema["properties"][name]
        while "properties" not in known and ("$ref" in known or "allOf" in known):
            reference = known.get("$ref") or known["allOf"][0]["$ref"]
            known = schema["definitions"][reference.rsplit("/", 1)[1]]
        if known.get("additionalProperties") is False:
            assert value.keys() == {each for each, schema in known["properties"].items() if schema is not False}, name


def test_images_have_a_registry_and_a_digest_where_they_are_given() -> None:
    digest = f"sha256:{'0' * 64}"
    values = (
        "images.registry=registry.example/team",
        "images.tag=1.2.3",
        f"images.worker.digest={digest}",
        "images.pullSecrets[0]=ours",
    )
    found = by_name(chart(values=values))
    pods = {name: found["Deployment", f"pdmesh-{name}"]["spec"]["template"]["spec"] for name in ("router", "decode", "redis")}
    images = {name: pod["containers"][0]["image"] for name, pod in pods.items()}
    assert images == {
        "router": "registry.example/team/pdmesh-router:1.2.3",
        "decode": f"registry.example/team/pdmesh-worker-cpu@{digest}",
        "redis": "redis:7.4-alpine",
    }
    assert all(pod["imagePullSecrets"] == [{"name": "ours"}] for pod in pods.values())


def test_the_versions_are_those_of_the_project() -> None:
    (about,) = documents(CHART / "Chart.yaml")
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    assert about["version"] == about["appVersion"] == project["version"]


def test_base_and_components_are_what_the_chart_makes() -> None:
    for path, text in contents(str(HELM)).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(FOLDER)} is older than the chart: make manifests"


def test_files_of_the_chart_are_those_of_the_kustomizations() -> None:
    for path in (CHART / "files").iterdir():
        assert path.is_symlink() and path.resolve() == (FOLDER / "components/telemetry" / path.name).resolve(), Path(path).name
