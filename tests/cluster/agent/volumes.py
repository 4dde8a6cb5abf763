"""A pod's volumes as folders, and the variables of its containers: what the kubelet makes of a specification."""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster import network
from tests.cluster.agent.api import Api, ApiError, Object
from tests.k8s.programs import quantity

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_TOKEN_S = 3600


class NotYet(RuntimeError):
    """Something that the pod needs is not there; the message is what a pod's status says."""


class Sources:
    """Secrets and ConfigMaps of a namespace, as they are when a pod starts."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace

    async def data(self, kind: str, name: str, *, optional: bool = False) -> dict[str, bytes]:
        """`kind` is secrets or configmaps. Raises NotYet for what is not there, unless `optional`; ApiError."""
        try:
            found = await self._api.call("GET", f"/api/v1/namespaces/{self._namespace}/{kind}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            if optional:
                return {}
            raise NotYet(f"{kind[:-1]} {name!r} not found") from error
        plain = {key: value.encode() for key, value in (found.get("data") or {}).items()}
        if kind == "configmaps":
            return plain
        return {key: base64.b64decode(value) for key, value in plain.items()}

    async def token(self, account: str, audience: list[str], pod: Object) -> str:
        """A token of a ServiceAccount that is bound to the pod. Raises ApiError."""
        bound = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        spec: Object = {"expirationSeconds": _TOKEN_S, "boundObjectRef": bound, "audiences": audience}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self._api.call("POST", f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token", body)
        return str(answer["status"]["token"])


async def make_volumes(pod: Object, folder: Path, sources: Sources) -> dict[str, Path]:
    """Folders by the volumes' names. Raises NotYet, ApiError; ValueError for a kind of volume that the test has not."""
    made = {}
    for volume in pod["spec"].get("volumes") or ():
        made[volume["name"]] = path = folder / "volumes" / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        await _fill(volume, path, pod, sources)
    return made


async def _fill(volume: Object, path: Path, pod: Object, sources: Sources) -> None:
    match volume:
        case {"emptyDir": _}:
            os.chmod(path, 0o777)
        case {"secret": source}:
            content = await sources.data("secrets", source["secretName"], optional=source.get("optional", False))
            _write(path, content, source.get("items"))
        case {"configMap": source}:
            content = await sources.data("configmaps", source["name"], optional=source.get("optional", False))
            _write(path, content, source.get("items"))
        case {"projected": {"sources": parts}}:
            for part in parts:
                _write(path, *await _projected(part, pod, sources))
        case _:
            raise ValueError(f"volume {volume['name']}: {', '.join(volume.keys() - {'name'})} is no kind that this agent knows")


async def _projected(part: Object, pod: Object, sources: Sources) -> tuple[dict[str, bytes], list[Object] | None]:
    match part:
        case {"serviceAccountToken": source}:
            audience = [source["audience"]] if "audience" in source else []
            token = await sources.token(pod["spec"]["serviceAccountName"], audience, pod)
            return {source["path"]: token.encode()}, None
        case {"configMap": source}:
            return await sources.data("configmaps", source["name"]), source.get("items")
        case {"secret": source}:
            return await sources.data("secrets", source["name"]), source.get("items")
        case {"downwardAPI": {"items": items}}:
            return {item["path"]: _field(item["fieldRef"]["fieldPath"], pod, "").encode() for item in items}, None
    raise ValueError(f"a projected volume of {', '.join(part)} is not known")


def _write(folder: Path, content: Mapping[str, bytes], items: list[Object] | None) -> None:
    names = {item["key"]: item["path"] for item in items} if items is not None else {key: key for key in content}
    for key, name in names.items():
        if key not in content:
            raise NotYet(f"references non-existent key: {key}")
        (folder / name).write_bytes(content[key])


async def environment(pod: Object, container: Object, address: str, sources: Sources) -> dict[str, str]:
    """Of a container, without its image's. Raises NotYet, ApiError."""
    values = {"KUBERNETES_SERVICE_HOST": network.API_SERVICE, "KUBERNETES_SERVICE_PORT": "443"}
    values["HOSTNAME"] = pod["metadata"]["name"]
    for variable in container.get("env") or ():
        if "valueFrom" in variable:
            text = await _variable(variable["valueFrom"], pod, container, address, sources)
        else:
            text = expanded(variable.get("value", ""), values)
        if text is not None:
            values[variable["name"]] = text
    return values


def expanded(text: str, values: Mapping[str, str]) -> str:
    """$(NAME) by its value; what is not known stays."""
    return _REFERENCE.sub(lambda match: values.get(match[1], match[0]), text)


async def _variable(source: Object, pod: Object, container: Object, address: str, sources: Sources) -> str | None:
    match source:
        case {"fieldRef": {"fieldPath": path}}:
            return _field(path, pod, address)
        case {"resourceFieldRef": {"resource": resource}}:
            group, _, what = resource.partition(".")
            return str(math.ceil(quantity(container["resources"][group][what])))
        case {"secretKeyRef": {"name": name, "key": key}}:
            kind, reference = "secrets", source["secretKeyRef"]
        case {"configMapKeyRef": {"name": name, "key": key}}:
            kind, reference = "configmaps", source["configMapKeyRef"]
        case _:
            raise ValueError(f"a variable from {', '.join(source)} is not known")
    content = await sources.data(kind, name, optional=reference.get("optional", False))
    if key not in content:
        if reference.get("optional"):
            return None
        raise NotYet(f"couldn't find key {key} in {kind[:-1]} {name}")
    return content[key].decode()


def _field(path: str, pod: Object, address: str) -> str:
    """A field by the downward API's names. Raises ValueError for one that the test does not need."""
    fields: dict[str, Any] = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
        "status.podIP": address,
        "spec.nodeName": pod["spec"]["nodeName"],
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.hostIP": network.GATEWAY,
    }
    if path not in fields:
        raise ValueError(f"the downward API's {path} is not known to this agent")
    return str(fields[path])


def mounts(container: Object, volumes: Mapping[str, Path]) -> list[Object]:
    """What is bound where, for `container.py`. Raises ValueError for a subPath that leads out of its volume."""
    found = []
    for entry in container.get("volumeMounts") or ():
        source = os.path.normpath(volumes[entry["name"]] / entry.get("subPath", ""))
        if not Path(source).is_relative_to(volumes[entry["name"]]):
            raise ValueError(f"subPath {entry['subPath']} leaves its volume")
        found.append({"source": source, "target": entry["mountPath"], "read_only": bool(entry.get("readOnly"))})
    return found
