"""What a module is called where it is imported: by its own name, so that a search for the name finds every use."""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

from tests.structure.measure import GENERATED, ROOT

ALIASES = {
    "pdmesh.engine.kernels.cpu.library": "abi",  # the structs that cross into C++ are the larger part of it
    "pdmesh.third_party.envoy.ext_proc_pb2": "pb",
    "pdmesh.third_party.envoy.ext_proc_pb2_grpc": "pb_grpc",
    "pdmesh.third_party.kserve.grpc_service_pb2": "pb",
    "pdmesh.third_party.kserve.model_config_pb2": "config_pb",
    "pdmesh.third_party.vllm.smg_common_pb2": "common_pb",
    "pdmesh.third_party.vllm.vllm_engine_pb2": "pb",
}
"""The exceptions."""

Imported = tuple[str, str]
"""The full name of what a statement imports, and the name that it gets."""


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Every tracked file but generated ones, parsed."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [path for path in listed if not GENERATED.search(path) and (ROOT / path).exists()]
    return {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in paths}


def imported(tree: ast.Module) -> Iterator[Imported]:
    """Yield what the file imports, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname) for alias in node.names if alias.asname is not None)


def is_own_name(module: str, name: str) -> bool:
    """Return whether `name` is the last part of `module`; where that is taken, some of its packages may stand before it in their
    order (`kserve_service`), or `_module` behind it."""
    *packages, last = (part.strip("_") for part in module.split("."))
    if name in (last, f"{last}_module", module.rsplit(".", 1)[-1]):
        return True
    rest = name.removesuffix(last)
    for package in packages:
        rest = rest.removeprefix(f"{package}_")
    return name.endswith(last) and not rest


def test_names_of_modules() -> None:
    assert is_own_name("router.api.kserve.service", "service")
    assert is_own_name("router.api.kserve.service", "kserve_service")
    assert is_own_name("router.telemetry.metrics", "router_metrics")
    assert is_own_name("pdmesh.engine.engine", "engine_module")
    assert is_own_name("benchmarks.autoscale.__main__", "autoscale_main")
    assert not is_own_name("router.api.frontend", "request_metadata")
    assert not is_own_name("router.api.kserve.service", "vllm_service")


def test_nothing_is_imported_under_two_names_in_one_file(trees: Mapping[str, ast.Module]) -> None:
    twice = []
    for path, tree in trees.items():
        names: dict[str, set[str]] = defaultdict(set)
        for full, name in imported(tree):
            names[full].add(name)
        twice += [f"{path}: {full} as {sorted(known)}" for full, known in names.items() if len(known) > 1]
    assert twice == []


def test_a_module_is_imported_under_its_own_name(trees: Mapping[str, ast.Module]) -> None:
    """A module that was merged into another one does not live on as an alias."""
    wrong = [
        f"{path}: {full} as {name}"
        for path, tree in trees.items()
        for full, name in imported(tree)
        if _is_module(full) and not is_own_name(full, name) and ALIASES.get(full) != name
    ]
    assert wrong == []


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
