"""How a container's program is configured: its command, flags and variables, read by the program's own loader."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdmesh.autoscaler.config import AutoscalerConfig
from pdmesh.cli import with_flags
from pdmesh.commands import loadtest
from pdmesh.runtime.config import ENV_PREFIX, FILE_SUFFIX, Option, options_of, parse
from pdmesh.runtime.rpc.tls import TlsConfig
from pdmesh.worker.config import DecodeConfig, PrefillConfig, WorkerConfig
from router.config import RouterConfig
from router.endpoint_picker.config import PickerConfig
from tests.k8s.kustomize import Manifest
from tests.k8s.meshes import Workload

PROGRAMS: Mapping[tuple[str, ...], type] = {
    ("python", "-m", "router"): RouterConfig,
    ("python", "-m", "pdmesh.worker"): WorkerConfig,
    ("python", "-m", "prefill_service"): PrefillConfig,
    ("python", "-m", "decode_service"): DecodeConfig,
    ("python", "-m", "pdmesh.autoscaler"): AutoscalerConfig,
    ("python", "-m", "router.endpoint_picker"): PickerConfig,
    ("pdmesh", "loadtest"): loadtest.Options,
}
# Read by packages themselves; a test asks them.
OTHER_VARIABLES = {"PDMESH_CACHE", "PDMESH_KERNELS_DIR"}
SECRETS = {
    ("pdmesh-redis", "url"): "redis://:password@pdmesh-redis:6379/0",
    ("pdmesh-mesh-secret", "secret"): "5e" * 32,
    ("pdmesh-loadtest", "key"): "key",
    ("pdmesh-autoscaler", "key"): "key",
}
_REFERENCE = re.compile(r"\$\(([A-Za-z_]+)\)")
_UNITS = {"m": 1e-3, "": 1.0, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}


def class_of(container: Manifest) -> type | None:
    """The configuration of a program of ours; None for others' programs."""
    return PROGRAMS.get(tuple(container.get("command", ())))


def options(container: Manifest) -> dict[str, Option]:
    """All settings of a program of ours, by variable."""
    cls = class_of(container)
    assert cls is not None
    return {option.env: option for option in options_of(cls, ENV_PREFIX)}


def config_of(workload: Workload, container: Manifest, tls: TlsConfig) -> Any:
    """As the program has it after its start; `tls` are files in place of those that a Secret would bring. Raises ConfigError."""
    cls = class_of(container)
    assert cls is not None
    values = environment(workload, container)
    files = {"PDMESH_TLS_CERT": tls.tls_cert, "PDMESH_TLS_KEY": tls.tls_key, "PDMESH_TLS_CA": tls.tls_ca}
    values.update({name: path for name, path in files.items() if name in values})
    for name in [name for name in values if name.endswith(FILE_SUFFIX)]:
        path = Path(tls.tls_cert).with_name(name)
        path.write_text(_mounted(values[name], workload, container) + "\n")
        values[name] = str(path)
    return parse(cls, with_flags(cls, container["args"]), values, prog="test")


def environment(workload: Workload, container: Manifest) -> dict[str, str]:
    """Its variables as the kubelet sets them in a pod with a long name."""
    values: dict[str, str] = {}
    for variable in container.get("env", ()):
        text = variable["value"] if "value" in variable else _from(variable["valueFrom"], workload, container)
        values[variable["name"]] = _REFERENCE.sub(lambda match: values[match[1]], text)
    return values


def _mounted(path: str, workload: Workload, container: Manifest) -> str:
    """What a file of a Secret holds. Raises StopIteration, KeyError where no such file is mounted."""
    mount = next(each for each in container["volumeMounts"] if each["mountPath"] == str(Path(path).parent))
    secret = next(each for each in workload.pod["volumes"] if each["name"] == mount["name"])["secret"]
    key = next(item["key"] for item in secret["items"] if item["path"] == Path(path).name)
    return SECRETS[secret["secretName"], key]


def _from(source: Manifest, workload: Workload, container: Manifest) -> str:
    match source:
        case {"secretKeyRef": {"name": name, "key": key}}:
            return SECRETS[name, key]
        case {"fieldRef": {"fieldPath": "metadata.name"}}:
            return f"{workload.name}-0123456789-abcde"
        case {"fieldRef": {"fieldPath": "metadata.namespace"}}:
            return "pdmesh"
        case {"fieldRef": {"fieldPath": "status.podIP"}}:
            return "10.0.0.7"
        case {"resourceFieldRef": {"containerName": name, "resource": resource}}:
            assert name == container["name"]
            group, _, what = resource.partition(".")
            return str(math.ceil(quantity(container["resources"][group][what])))
    raise ValueError(f"{source} is not known")


def quantity(text: str) -> float:
    """Kubernetes' 500m, 2, 1Gi as a number. Raises KeyError for another unit."""
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)) * _UNITS[unit]


def is_below(path: str, folders: list[str]) -> bool:
    """Whether a path lies in one of the folders."""
    return any(Path(path).is_relative_to(folder) for folder in folders)
