"""Manifests: they can be read, and what they tell the router is what it takes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from router import tenants_file
from router.config import RouterConfig
from runtime.config import parse

FOLDER = Path(__file__).parent.parent / "k8s"


def _documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_every_document_says_what_it_is(path: Path) -> None:
    for document in _documents(path.name):
        assert {"apiVersion", "kind", "metadata"} <= document.keys()


def test_the_router_takes_its_flags_and_mounts_what_they_name() -> None:
    deployment = next(document for document in _documents("router.yaml") if document["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    config = parse(RouterConfig, container["args"], {}, prog="router")
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (config.api_keys, config.tenants, *config.model_folders().values()):
        assert any(Path(path).is_relative_to(mount) for mount in mounts), path
    assert {port["containerPort"] for port in container["ports"]} == {config.port, config.http_port}
    assert pod["terminationGracePeriodSeconds"] > config.drain_grace_s + config.linger_s
    claimed = [volume.get("configMap", {}).get("name") for volume in pod["volumes"]]
    assert _documents("tenants.yaml")[0]["metadata"]["name"] in claimed


def test_the_tenants_are_good() -> None:
    data = _documents("tenants.yaml")[0]["data"]["tenants.toml"]
    assert tenants_file.parse(tomllib.loads(data)).limits_of("search").weight == 4.0
