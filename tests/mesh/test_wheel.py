"""The wheel is a guest in other people's environments: it works beside packages that are called as ours are."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.up_command import UpCommand

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("protos", "router", "runtime", "worker", "engine", "text", "planning", "simulator", "autoscaler")
CLIENT = ("grpcio", "grpcio-status", "protobuf", "googleapis-common-protos", "typing_extensions")
INSTALLED = {"decode_service", "kvtransfer", "pdmesh", "pdmesh_vllm", "prefill_service", "router"}
BOTH_PROTOS = """
import mesh_pb2, protos, runtime
from pdmesh.client import AsyncClient, Client, Delta
from pdmesh.v1 import mesh_pb2 as ours
assert mesh_pb2.Mine.DESCRIPTOR.full_name == "mine.Mine" and ours.Delta.DESCRIPTOR.full_name == "pdmesh.v1.Delta"
print(protos.OWNER, runtime.OWNER)
"""


def listed() -> list[str]:
    """Return the files of this checkout."""
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders behind in its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in listed():
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


def test_it_installs_its_packages_with_all_their_files(wheel: Path, tmp_path: Path) -> None:
    """Sources of kernels, pages of the console and stubs among them."""
    site = install(wheel, tmp_path / "environment")
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == INSTALLED
    names = [name for name in listed() if name.split("/")[0] in INSTALLED and (ROOT / name).is_file()]
    assert [name for name in names if not (site / name).is_file()] == []
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


@pytest.fixture
def up(environment: Path, crowded: Path, tmp_path: Path) -> Iterator[UpCommand]:
    """Yield a mesh that the installed `pdmesh up` runs in the crowded folder; afterwards nothing of it may be left."""
    with UpCommand((str(environment / "pdmesh"),), cwd=crowded, folder=tmp_path, env=clean()) as mesh:
        mesh.wait_listening()
        yield mesh
        assert mesh.end(signal.SIGINT) == 0
        assert mesh.leftovers() == []


def test_programs_import_the_wheel_and_nothing_of_the_checkout(environment: Path, tmp_path: Path) -> None:
    imports = "import decode_service, kvtransfer, pdmesh, prefill_service, router, sys"
    command = [str(environment / "python"), "-P", "-c", f"{imports}; print(pdmesh.__file__, router.__file__, *sys.path)"]
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=60, check=True)
    shown = done.stdout.split()
    assert all(Path(path).is_relative_to(environment.parent) for path in shown[:2])
    assert not any(Path(path) == ROOT for path in shown)


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_a_mesh_runs_and_answers_in_that_folder(up: UpCommand) -> None:
    """One question on the command line, and a conversation of two turns from standard input."""
    assert "Paris" in up.answer("What is the capital of France?")
    asked = "What is the capital of France?\nWhat is the capital of Italy?\n/exit\n"
    talk = up.run("chat", "--temperature", "0", "--max-tokens", "16", text=asked)
    assert "Paris" in talk.stdout and "Rome" in talk.stdout, talk.stdout + talk.stderr
