"""The wheel is a guest in other people's environments: it works beside packages that are called as ours are.

`python -m build` makes it, from the source distribution that it makes first. Tests need no network, so the packages that it
declares are not downloaded: they are linked from the environment that runs the tests, and no other of its packages is.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    # The build backend is that of this environment: one of its own would be downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    (found,), (_sources,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
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
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True, timeout=120)
    return site


def declared(site: Path, extra: str) -> set[str]:
    """Return the distributions that `pip install pdmesh[extra]` brings along here, for the pdmesh in `site`, by their names."""
    (pdmesh,) = metadata.distributions(path=[str(site)])
    todo = [(each, {extra, ""}) for each in map(Requirement, pdmesh.requires or ())]
    found, done = set[str](), set[tuple[str, frozenset[str]]]()
    while todo:
        each, extras = todo.pop()
        if each.marker is not None and not any(each.marker.evaluate({"extra": wanted}) for wanted in extras):
            continue
        name, key = canonicalize_name(each.name), (canonicalize_name(each.name), frozenset(each.extras))
        if key in done:
            continue
        done.add(key)
        found.add(name)
        requires = pdmesh.requires if name == "pdmesh" else metadata.requires(name)
        todo += [(below, {*each.extras, ""}) for below in map(Requirement, requires or ())]
    return found - {"pdmesh"}


def link(names: Iterable[str], site: Path) -> None:
    """Link the files of distributions of this environment; whole folders where no other distribution has files in them."""
    files = {canonicalize_name(each.name): each.files or () for each in metadata.distributions()}
    owners: dict[str, set[str]] = defaultdict(set)
    for name, listed_files in files.items():
        for file in listed_files:
            owners[file.parts[0]].add(name)
    for name in map(canonicalize_name, names):
        for file in files[name]:
            top = file.parts[0]
            if top in ("..", "__pycache__"):
                continue
            target = Path(top) if len(owners[top]) == 1 else Path(file)
            (site / target).parent.mkdir(parents=True, exist_ok=True)
            if not (site / target).exists():
                (site / target).symlink_to(Path(str(metadata.distribution(name).locate_file(str(target)))))


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
    link(CLIENT, site)
    python = tmp_path / "environment/bin/python"
    shown = subprocess.run(
        [python, "-c", BOTH_PROTOS], cwd=crowded, env=clean(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (shown.stdout.split(), shown.stderr) == (["theirs", "theirs"], "")


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Path:
    """Return the programs of an environment that has the wheel, the packages that `pdmesh[local]` declares, and no others."""
    site = install(wheel, tmp_path / "environment")
    link(declared(site, "local"), site)
    return tmp_path / "environment/bin"


@pytest.fixture
def up(environment: Path, crowded: Path, tmp_path: Path) -> Iterator[UpCommand]:
    """Yield a mesh that the installed `pdmesh up` runs in the crowded folder; afterwards nothing of it may be left."""
    with UpCommand((str(environment / "pdmesh"),), cwd=crowded, folder=tmp_path, env=clean()) as mesh:
        mesh.wait_listening()
        yield mesh
        mesh.wait_ready()
        assert mesh.end(signal.SIGINT) == 0
        assert mesh.leftovers() == []


def test_programs_import_the_wheel_and_nothing_of_the_checkout(environment: Path, tmp_path: Path) -> None:
    imports = "import decode_service, kvtransfer, pdmesh, prefill_service, router, sys"
    command = [str(environment / "python"), "-P", "-c", f"{imports}; print(pdmesh.__file__, router.__file__, *sys.path)"]
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=60, check=True)
    shown = done.stdout.split()
    assert all(Path(path).is_relative_to(environment.parent) for path in shown[:2])
    assert not any(Path(path) == ROOT for path in shown)
    others = {path.name for path in environment.parent.glob("lib/python*/site-packages/*")}
    assert "torch" in others and not others & {"pytest", "hypothesis", "mypy", "scipy", "_pytest", "build"}


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_a_mesh_runs_and_answers_in_that_folder(up: UpCommand) -> None:
    """One question on the command line, and a conversation of two turns from standard input."""
    assert "Paris" in up.answer("What is the capital of France?")
    asked = "What is the capital of France?\nWhat is the capital of Italy?\n/exit\n"
    talk = up.run("chat", "--temperature", "0", "--max-tokens", "16", text=asked)
    assert "Paris" in talk.stdout and "Rome" in talk.stdout, talk.stdout + talk.stderr
