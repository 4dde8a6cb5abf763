"""The wheel is a guest in other people's environments: it works beside packages that are called as ours are."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("protos", "router", "runtime", "worker", "engine", "text", "planning", "simulator", "autoscaler")
CLIENT = ("grpcio", "grpcio-status", "protobuf", "googleapis-common-protos", "typing_extensions")
INSTALLED = {"decode_service", "kvtransfer", "pdmesh", "prefill_service", "router"}
START_S = 120.0
BOTH_PROTOS = """
import mesh_pb2, protos, runtime
from pdmesh.client import AsyncClient, Client, Delta
from pdmesh.v1 import mesh_pb2 as ours
assert mesh_pb2.Mine.DESCRIPTOR.full_name == "mine.Mine" and ours.Delta.DESCRIPTOR.full_name == "pdmesh.v1.Delta"
print(protos.OWNER, runtime.OWNER)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders behind in its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in listed:
        if name.split("/")[0] in INSTALLED | {"protos", "pyproject.toml", "README.md", "LICENSE"} and (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*command, str(folder / "source")], check=True, timeout=300, stdout=subprocess.DEVNULL)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """Return a folder with packages and a proto file that are called as ours are."""
    folder = tmp_path / "theirs"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            f'OWNER = "theirs"\nif __name__ == "__main__":\n    raise SystemExit("{name}")\n'
        )
        (folder / name / "__main__.py").write_text(f'raise SystemExit("their {name} was started")\n')
    (folder / "mesh.proto").write_text('syntax = "proto3";\npackage mine;\nmessage Mine {}\n')
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--python_out={folder}", "mesh.proto"]
    subprocess.run(compiler, check=True, timeout=60, cwd=folder)
    return folder


def install(wheel: Path, folder: Path) -> Path:
    """Return the site-packages of a new environment with the wheel and nothing else."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    return site


def clean() -> dict[str, str]:
    """Return the environment of a user without anything of this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_it_installs_five_packages(wheel: Path, tmp_path: Path) -> None:
    site = install(wheel, tmp_path / "environment")
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == INSTALLED
    ours = {path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto")}
    shared = tmp_path / "environment/share/pdmesh/protos"
    assert {path.relative_to(shared) for path in shared.rglob("*.proto")} == ours


def test_the_client_works_beside_packages_of_the_same_names(wheel: Path, crowded: Path, tmp_path: Path) -> None:
    """In an environment with the client's declared dependencies alone."""
    site = install(wheel, tmp_path / "environment")
    for name in CLIENT:
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, site / file)
    python = tmp_path / "environment/bin/python"
    shown = subprocess.run(
        [python, "-c", BOTH_PROTOS], cwd=crowded, env=clean(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (shown.stdout.split(), shown.stderr) == (["theirs", "theirs"], "")


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """Return the programs of an environment that has the wheel, and all packages that this one has but pdmesh's checkout."""
    site = install(wheel, tmp_path / "environment")
    (site / "others.pth").write_text(str(Path(str(metadata.distribution("grpcio").locate_file("")))) + "\n")
    return tmp_path / "environment/bin"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def up(environment: Path, crowded: Path) -> Iterator[int]:
    """Return the port of a mesh that `pdmesh up` runs in the crowded folder."""
    port = free_port()
    command = [str(environment / "pdmesh"), "up", "--port", str(port), "--http-port", "", "--no-console", "--threads", "1"]
    mesh = subprocess.Popen(command, cwd=crowded, env=clean(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and mesh.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        assert mesh.poll() is None, mesh.stdout and mesh.stdout.read()
        yield port
    finally:
        mesh.send_signal(signal.SIGINT)
        mesh.communicate(timeout=60)


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_a_mesh_runs_and_answers_in_that_folder(up: int, environment: Path, crowded: Path) -> None:
    question = [str(environment / "pdmesh"), "chat", "What is the capital of France?", "--temperature", "0", "--max-tokens", "16"]
    asked = [*question, "--router", f"127.0.0.1:{up}"]
    ends = time.monotonic() + START_S
    while True:  # the router listens before its workers are ready
        answer = subprocess.run(asked, cwd=crowded, env=clean(), capture_output=True, text=True, timeout=120, check=False)
        if "Paris" in answer.stdout or time.monotonic() > ends:
            break
        time.sleep(0.5)
    assert "Paris" in answer.stdout, answer.stderr
