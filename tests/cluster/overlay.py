"""What the manifests become for an API server of 1.20: the same objects, where it has no word for them in the words that it has.

| in the manifests | here | why |
| --- | --- | --- |
| `policy/v1` | `policy/v1beta1` | 1.21 brought the former; the fields that are used are the same |
| `autoscaling/v2` | `autoscaling/v2beta2` | 1.23; the same |
| probes with `grpc` | an annotation that the node agent reads | 1.23 |
| kinds of other projects | the same, with a CustomResourceDefinition that takes any field | their operators are not here |

Nothing else changes: `python -m tests.cluster.overlay FOLDER` prints what comes of a kustomization.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from tests.cluster.agent.probes import GRPC_ANNOTATION, KINDS
from tests.k8s.kustomize import Manifest, render

VERSIONS = {"policy/v1": "policy/v1beta1", "autoscaling/v2": "autoscaling/v2beta2"}
_FOREIGN = {
    "monitoring.coreos.com": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "keda.sh": ("ScaledObject",),
    "inference.networking.k8s.io": ("InferencePool",),
}


def mapped(manifest: Manifest) -> Manifest:
    """One object in the server's words."""
    changed = deepcopy(manifest)
    changed["apiVersion"] = VERSIONS.get(changed["apiVersion"], changed["apiVersion"])
    template = changed.get("spec", {}).get("template") if changed["kind"] in ("Deployment", "Job", "DaemonSet") else None
    if template and (kept := dict(_taken_grpc_probes(template["spec"]))):
        template["metadata"].setdefault("annotations", {})[GRPC_ANNOTATION] = json.dumps(kept, sort_keys=True)
    return changed


def _taken_grpc_probes(pod: Manifest) -> Iterator[tuple[str, Manifest]]:
    for container in pod["containers"]:
        found = {kind: container[kind] for kind in KINDS if "grpc" in container.get(kind, ())}
        for kind in found:
            del container[kind]
        if found:
            yield container["name"], found


def definitions(manifests: Iterable[Manifest]) -> list[Manifest]:
    """CustomResourceDefinitions of the other projects' kinds among them."""
    found = {(manifest["apiVersion"].rpartition("/"), manifest["kind"]) for manifest in manifests}
    return [_definition(group, version, kind) for (group, _, version), kind in sorted(found) if kind in _FOREIGN.get(group, ())]


def _definition(group: str, version: str, kind: str) -> Manifest:
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    # The server takes groups of Kubernetes' own projects (*.k8s.io) only with a word on who approved them.
    approval = {"api-approved.kubernetes.io": "unapproved, it stands for the project's own in a test"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": approval},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


def text_of(manifests: Iterable[Manifest]) -> str:
    """For `kubectl apply -f -`."""
    return str(yaml.safe_dump_all(list(manifests), sort_keys=False))


if __name__ == "__main__":
    print(text_of(mapped(manifest) for manifest in render(Path(sys.argv[1]))))
