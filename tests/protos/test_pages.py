"""What docs/grpc.md and the README name exists: files, programs, flags, statuses, fields."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from pdmesh.runtime.config import parse
from pdmesh.v1 import mesh_pb2
from router.config import RouterConfig
from tools.protos.descriptors import ROOT

GUIDE = (ROOT / "docs/grpc.md").read_text(encoding="utf-8")
PROTO_FILES = shlex.split(re.findall(r'^FILES="(.+)"$', GUIDE, re.MULTILINE)[0])


@pytest.mark.parametrize("page", ["README.md", "docs/grpc.md", "docs/structure.md"])
def test_links_lead_to_files(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


def test_programs_exist_and_are_all_named() -> None:
    named = set(re.findall(r"python -m examples\.(\w+)", GUIDE))
    assert named == {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}
    assert "sh examples/shell.sh" in GUIDE and (ROOT / "examples/shell.sh").exists()


def test_flags_are_those_of_a_router() -> None:
    flags = ["--linger-s", "--drain-grace-s", "--tls-client-auth"]
    assert all(flag in GUIDE for flag in flags)
    config = parse(
        RouterConfig, ["--models=m=f", "--linger-s=5", "--drain-grace-s=9", "--tls-client-auth=none"], {}, prog="router"
    )
    assert (config.linger_s, config.drain_grace_s, config.tls_client_auth) == (5, 9, "none")
    default = RouterConfig(models=("m=f",))
    assert f"({default.linger_s} s)" in GUIDE and f"({default.drain_grace_s:.0f} s)" in GUIDE


def test_statuses_are_those_of_grpc() -> None:
    statuses = {name for row in re.findall(r"^\| ([A-Z_]+(?:, [A-Z_]+)*)\b", GUIDE, re.MULTILINE) for name in row.split(", ")}
    assert (
        {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"}
        <= statuses
        <= {code.name for code in grpc.StatusCode}
    )


def test_clients_need_these_files_and_no_others() -> None:
    """The Mesh service's file and all that it imports, directly or not."""
    needed, left = set[str](), [mesh_pb2.DESCRIPTOR]
    while left:
        file = left.pop()
        needed.add(file.name)
        left += file.dependencies
    assert sorted(PROTO_FILES) == sorted(needed)


def test_the_stubs_of_the_guide_work_alone(tmp_path: Path) -> None:
    """As somebody makes them who has the .proto files and not our package."""
    outputs = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *outputs, *PROTO_FILES], cwd=ROOT, check=True, timeout=60
    )
    program = "from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc; print(mesh_pb2.__file__, mesh_pb2_grpc.MeshStub.__name__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.split() == [str(tmp_path / "pdmesh/v1/mesh_pb2.py"), "MeshStub"]
