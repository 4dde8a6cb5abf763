"""As much of kustomize as the manifests use, so that what an overlay comes to can be tested without kubectl.

What is not known here is refused.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

Manifest = dict[str, Any]
FOLDER = Path(__file__).parents[2] / "k8s"
KNOWN = {"apiVersion", "kind", "namespace", "nameSuffix", "resources", "patches", "images"}
CLUSTER_KINDS = {"Namespace", "PriorityClass", "APIService"}
# By which field the API has elements of a list merge; all other lists are replaced as a whole.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",  # of a container; those of a Service have others, and nobody patches them
}

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many times as fast, where it is there


def parsed(text: str) -> list[Manifest]:
    """All documents of a text."""
    return [document for document in yaml.load_all(text, _LOADER) if document]


@cache
def _parsed_file(path: Path) -> list[Manifest]:
    return parsed(path.read_text(encoding="utf-8"))


def documents(path: Path) -> list[Manifest]:
    """All documents of a file, which are the caller's."""
    return deepcopy(_parsed_file(path.resolve()))


def kustomization(folder: Path) -> Manifest:
    """The kustomization of a folder. Raises ValueError for a field that is not known."""
    (content,) = documents(folder / "kustomization.yaml")
    if unknown := content.keys() - KNOWN:
        raise ValueError(f"{folder}: {', '.join(sorted(unknown))} not known")
    return content


def folders_of(folder: Path) -> list[Path]:
    """The kustomizations that one takes in."""
    return [folder / name for name in kustomization(folder).get("resources", ()) if (folder / name).is_dir()]


def files_of(folder: Path, field: str) -> list[Path]:
    """The files that its `resources` or `patches` name. Raises ValueError for a patch that is not a file alone."""
    named = kustomization(folder).get(field, ())
    if field == "patches" and (others := [patch for patch in named if patch.keys() != {"path"}]):
        raise ValueError(f"{folder}: patches: {others[0]} is more than a path")
    paths = [folder / (name["path"] if field == "patches" else name) for name in named]
    return [path for path in paths if not path.is_dir()]


def render(folder: Path) -> list[Manifest]:
    """What `kubectl kustomize` of the folder prints, in any order. Raises ValueError."""
    settings = kustomization(folder)
    found = [manifest for base in folders_of(folder) for manifest in render(base)]
    found += [manifest for path in files_of(folder, "resources") for manifest in documents(path)]
    for patch in (patch for path in files_of(folder, "patches") for patch in documents(path)):
        targets = [number for number, manifest in enumerate(found) if name_of(manifest) == name_of(patch)]
        if len(targets) != 1:
            raise ValueError(f"{folder}: {name_of(patch)} is there {len(targets)} times")
        found[targets[0]] = merged(found[targets[0]], patch)
    for manifest in found:
        _set_names(manifest, settings)
        _set_images(manifest, settings.get("images", ()))
    return found


def name_of(manifest: Manifest) -> tuple[str, str]:
    """Kind and name."""
    return manifest["kind"], manifest["metadata"]["name"]


def merged(original: Any, patch: Any, field: str = "") -> Any:
    """A strategic merge: maps by key (null takes one away), lists by `MERGE_KEYS`, all else replaced."""
    if isinstance(original, dict) and isinstance(patch, dict):
        result = {key: value for key, value in original.items() if key not in patch}
        for key, value in patch.items():
            if value is not None:
                result[key] = merged(original.get(key), value, key)
        return result
    if isinstance(original, list) and is_merged(field, original):
        key = MERGE_KEYS[field]
        by_key = {element[key]: element for element in original}
        by_key.update({element[key]: merged(by_key.get(element[key]), element) for element in patch})
        return list(by_key.values())
    return _without_nulls(patch)


def is_merged(field: str, elements: list[Any]) -> bool:
    """Whether the elements of a list merge by a key of theirs."""
    return field in MERGE_KEYS and all(isinstance(each, dict) and MERGE_KEYS[field] in each for each in elements)


def ordered(value: Any, field: str = "") -> Any:
    """A value with the lists that merge in the order of their keys, in which nothing depends."""
    if isinstance(value, list):
        elements = [ordered(element) for element in value]
        return sorted(elements, key=lambda element: element[MERGE_KEYS[field]]) if is_merged(field, elements) else elements
    if not isinstance(value, dict):
        return value
    return {key: ordered(inner, key) for key, inner in value.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return deepcopy(value)


def _set_names(manifest: Manifest, settings: Manifest) -> None:
    """A suffix is only for what nobody refers to by name."""
    if suffix := settings.get("nameSuffix"):
        if manifest["kind"] != "Deployment":
            raise ValueError(f"{name_of(manifest)} cannot have the suffix {suffix}")
        manifest["metadata"]["name"] += suffix
    if "namespace" in settings and manifest["kind"] not in CLUSTER_KINDS:
        manifest["metadata"]["namespace"] = settings["namespace"]


def _set_images(manifest: Manifest, images: list[Manifest]) -> None:
    for container in containers_of(manifest):
        name, _, tag = container["image"].partition(":")
        for image in images:
            if image["name"] == name:
                name, tag = image.get("newName", name), image["newTag"]
                break
        container["image"] = f"{name}:{tag}" if tag else name


def containers_of(manifest: Manifest) -> list[Manifest]:
    """Those of its pods, the ones that come first among them; none for what has no pods."""
    pod = pod_of(manifest)
    return [] if pod is None else [*pod.get("initContainers", ()), *pod.get("containers", ())]


def pod_of(manifest: Manifest) -> Manifest | None:
    """The specification of its pods, or None."""
    template = manifest.get("spec", {}).get("template") if manifest["kind"] in ("Deployment", "Job") else None
    return template["spec"] if template else None
