"""Measure the shape of the tree: modules, folders, import circles, and the files that one request enters.

`python -m tests.structure.measure` prints the counts, `--json` also the names behind them. Product means every tracked .py file
outside tests, benchmarks, examples, tools and docs that is not a generated stub. `test_structure.py` compares counts with goals.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from types import FrameType

# Everything of the repository that the measurement runs: modules that move are renamed here alone.
from pdmesh.v1 import common_pb2
from router.context import RouterContext
from router.flow_control.slo_admission import FlowItem
from router.flow_control.ttft_predictor import flow_item_of
from router.main import Router
from router.tokenization.prepared_request import PreparedRequest
from tests.kvtransfer.endpoints import World, running
from tests.router.mesh import Mesh, config_for, request, running_router
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tests.support.worker_mesh import MODEL, REMOTE, load_tiny, running_worker

ROOT = Path(__file__).resolve().parents[2]
NOT_PRODUCT = {"tests", "benchmarks", "examples", "tools", "docs"}
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
LAYERS_CONTRACT = "imports point one way"
REGISTERED_FOLDERS = {
    "kvtransfer/transports",
    "pdmesh/commands",
    "pdmesh/engine/loader/quantized",
    "pdmesh/engine/models/families/dense",
    "pdmesh/engine/models/families/experts",
    "pdmesh/engine/models/families/latent",
    "pdmesh/engine/models/families/layernorm",
    "pdmesh/engine/speculation/proposers",
    "pdmesh/text/parsers/formats",
    "router/routing/policies",
}
"""Folders with one file for each entry of a registry, whether they exist yet or not. The recipes of docs/structure.md ask for one
new file there, so goals for the number of modules and of files in a folder leave these out."""
FOLDER_FILES, APPENDIX_LINES = 15, 100
IDLE_S = 1.5  # longer than each period of reports and heartbeats
NUM_RUNS = 3
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 50, 8

Graph = dict[str, set[str]]
Function = tuple[str, int, str]
"""File, line and qualified name."""


@dataclass(frozen=True)
class Module:
    """One product file, parsed."""

    name: str
    path: str
    tree: ast.Module
    num_lines: int

    @property
    def folder(self) -> str:
        return str(PurePath(self.path).parent)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def is_empty(self) -> bool:
        """True if nothing but a docstring stands in it."""
        return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in self.tree.body)

    @property
    def has_code(self) -> bool:
        return not (self.is_package and self.is_empty)

    @property
    def counts_in_folder(self) -> bool:
        return PurePath(self.path).name not in ("__init__.py", "__main__.py")


@dataclass(frozen=True)
class Entered:
    """What one activity enters: product files, and the number of functions in them."""

    files: list[str]
    num_functions: int


@dataclass(frozen=True)
class Figures:
    """The counts, and the names behind them."""

    counts: dict[str, int]
    names: dict[str, list[str]]


# Static: modules and their imports


def product() -> dict[str, Module]:
    """Return the product's modules by dotted name."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    paths = [path for path in listed if path and PurePath(path).parts[0] not in NOT_PRODUCT and not GENERATED.search(path)]
    modules = [_module(path) for path in paths if (ROOT / path).exists()]
    return {module.name: module for module in modules}


def _module(path: str) -> Module:
    text = (ROOT / path).read_text(encoding="utf-8")
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Module(name, path, ast.parse(text), text.count("\n"))


def imports(modules: Mapping[str, Module], *, deferred: bool) -> Graph:
    """Return the product modules that each module imports. `deferred`: also in functions, and for type checking only."""
    return {name: {*_imported(module, modules, deferred)} - {name} for name, module in modules.items()}


def _imported(module: Module, modules: Mapping[str, Module], deferred: bool) -> Iterator[str]:
    statements = ast.walk(module.tree) if deferred else _at_import(module.tree.body)
    for node in statements:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            names = [full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in modules)


def _base(module: Module, node: ast.ImportFrom) -> str:
    """The module after `from`, with the dots of a relative import resolved."""
    if not node.level:
        return node.module or ""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    parents = package[: len(package) - node.level + 1]
    return ".".join([*parents, *filter(None, [node.module])])


def _at_import(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_import(node.orelse)
            continue
        yield node
        yield from _at_import(ast.iter_child_nodes(node))


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one module."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset({name, *(other for other in reached[name] if name in reached[other])}) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - seen
        seen |= new
        left += new
    return seen


def up_arrows(graph: Graph) -> list[str]:
    """Return the imports from a layer into a higher one, or into a sibling that is independent of it. Exceptions of the contract
    count as well."""
    layers = _layers()
    arrows = [(importer, imported) for importer, names in graph.items() for imported in names]
    return sorted(f"{importer} -> {imported}" for importer, imported in arrows if _points_up(layers, importer, imported))


def _layers() -> dict[str, tuple[int, str]]:
    """Package to height, with its group of siblings that may import each other; the highest layer is 0."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contract = next(entry for entry in tool["importlinter"]["contracts"] if entry["name"] == LAYERS_CONTRACT)
    layers: dict[str, tuple[int, str]] = {}
    for prefix in [f"{container}." for container in contract.get("containers", [])] or [""]:
        for height, line in enumerate(contract["layers"]):
            for group in line.split("|"):
                layers |= {prefix + name.strip(" ()"): (height, group) for name in group.split(":")}
    return layers


def _points_up(layers: Mapping[str, tuple[int, str]], importer: str, imported: str) -> bool:
    source, target = _package(layers, importer), _package(layers, imported)
    if source is None or target is None or source == target:
        return False
    (from_height, from_group), (to_height, to_group) = layers[source], layers[target]
    return to_height < from_height or (to_height == from_height and to_group != from_group)


def _package(layers: Mapping[str, tuple[int, str]], module: str) -> str | None:
    """The innermost package of the contract that holds `module`."""
    return max((name for name in layers if f"{module}.".startswith(f"{name}.")), key=len, default=None)


def appendices(modules: Mapping[str, Module], graph: Graph) -> list[str]:
    """Return short modules with one importer in the product, which stands in the same folder."""
    importers: dict[str, list[str]] = {name: [] for name in modules}
    for importer, names in graph.items():
        for name in names:
            importers[name].append(importer)
    return [
        f"{module.path} ({module.num_lines} lines) <- {importers[name][0]}"
        for name, module in sorted(modules.items())
        if module.counts_in_folder and module.num_lines < APPENDIX_LINES and len(importers[name]) == 1
        if modules[importers[name][0]].folder == module.folder
    ]


def folders(modules: Mapping[str, Module]) -> dict[str, int]:
    """Return the number of files in each folder, largest first, without __init__.py and __main__.py."""
    counted = Counter(module.folder for module in modules.values() if module.counts_in_folder)
    return {folder: count for folder, count in counted.most_common() if folder not in REGISTERED_FOLDERS}


# Dynamic: the files that an activity enters


class Recorder:
    """A profile hook of all threads that remembers each product function that is entered while `is_on`."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.is_on = False
        self._files = {str(ROOT / module.path): module.path for module in modules.values()}
        self._entered: set[Function] = set()

    def install(self) -> None:
        """Watch this thread and those that start later: to be called before anything is started."""
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        if self.is_on and event == "call":
            code = frame.f_code
            self._entered.add((code.co_filename, code.co_firstlineno, code.co_qualname))

    async def during(self, activity: Awaitable[object]) -> set[Function]:
        """Return the product functions that are entered until `activity` ends, without comprehensions."""
        self._entered = set()
        self.is_on = True
        try:
            await activity
        finally:
            self.is_on = False
        found = [(self._files[file], line, name) for file, line, name in self._entered if file in self._files]
        return {function for function in found if not function[2].endswith(("comp>", "<genexpr>", "<module>"))}

    async def path_of(self, activity: Callable[[int], Awaitable[object]], *, idle_s: float = 0.0) -> Entered:
        """Return what `activity` enters every time, after one run as a warm-up; it is given the number of the run.

        Functions that are entered without it within `idle_s` are left out: load reports, heartbeats, timers."""
        await activity(0)
        idle = await self.during(asyncio.sleep(idle_s))
        runs = [await self.during(activity(number)) for number in range(1, NUM_RUNS + 1)]
        functions = set.intersection(*runs) - idle
        return Entered(sorted({file for file, _, _ in functions}), len(functions))


async def remote_request(mesh: Mesh, number: int) -> None:
    """One request from the router's handler to the last message, through both workers. No two prompts share a block."""
    answer = await mesh.generate(request(_prompt(number), max_tokens=NUM_OUTPUT_TOKENS, mode=REMOTE))
    assert answer.timings.prefill_worker == "p" and answer.timings.decode_worker == "d", answer.timings


async def admission(core: RouterContext, asked: PreparedRequest | FlowItem) -> None:
    """The decision on one request, which starts and keeps its place; of a job, what admission knows of it is gathered first."""
    await core.flow_control.enter(flow_item_of(core, asked) if isinstance(asked, PreparedRequest) else asked)


async def tcp_push(world: World, number: int) -> None:
    """One push from the sender's call to the receiver's commit."""
    await world.sender.push(world.job(f"r{number}"), timeout_s=10)


@asynccontextmanager
async def real_mesh(folder: Path) -> AsyncIterator[Mesh]:
    """A router, one prefill and one decode worker with a tiny random model: all in this process, on loopback sockets."""
    model = load_tiny(make_tiny_model(folder))
    async with (
        running_worker(model, roles=("prefill",), worker_id="p") as prefill,
        running_worker(model, roles=("decode",), worker_id="d") as decode,
    ):
        config = replace(config_for(folder, policy="predict"), workers=(prefill.info.address, decode.info.address))
        async with running_router(config) as (router, stub):
            await eventually(lambda: len(router.core.fleet.views()) == 2 and router.core.fleet.ready())
            yield Mesh(router, stub, {})


def _prompt(number: int) -> list[int]:
    return [64 + number, *range(64, 64 + NUM_PROMPT_TOKENS)]


def _prepared(router: Router) -> PreparedRequest:
    params = common_pb2.SamplingParams(n=1, seed=5, max_tokens=NUM_OUTPUT_TOKENS)
    return PreparedRequest("job", router.core.models[MODEL], tuple(_prompt(0)), params, ())


async def paths(recorder: Recorder) -> dict[str, Entered]:
    """Return what each activity enters. Admission goes by count unless the name says otherwise."""
    found: dict[str, Entered] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with real_mesh(Path(folder)) as mesh:
            core, prepared = mesh.router.core, _prepared(mesh.router)
            found["remote"] = await recorder.path_of(lambda number: remote_request(mesh, number), idle_s=IDLE_S)
            found["admission_of_job_by_forecast"] = await recorder.path_of(lambda _: admission(core, prepared), idle_s=IDLE_S)
            core.forecaster = None
            found["admission_of_job"] = await recorder.path_of(lambda _: admission(core, prepared), idle_s=IDLE_S)
            item = flow_item_of(core, prepared)
            found["admission"] = await recorder.path_of(lambda _: admission(core, item), idle_s=IDLE_S)
    async with running(World("tcp")) as world:
        found["tcp_push"] = await recorder.path_of(lambda number: tcp_push(world, number))
    return found


# The report


def measure() -> Figures:
    """Return all figures of the tree around this file."""
    modules = product()
    names = static_names(modules)
    recorder = Recorder(modules)
    recorder.install()
    counts = {
        "modules": len(modules),
        "modules_with_code": sum(module.has_code for module in modules.values()),
        "modules_not_registered": sum(module.has_code and module.folder not in REGISTERED_FOLDERS for module in modules.values()),
        "largest_folder": max(folders(modules).values()),
        **{name: len(found) for name, found in names.items()},
    }
    for name, entered in asyncio.run(paths(recorder)).items():
        counts |= {f"{name}_files": len(entered.files), f"{name}_functions": entered.num_functions}
        names[f"{name}_files"] = entered.files
    return Figures(counts, names)


def static_names(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Return what imports and folders show. `any_circles` has also circles through deferred imports."""
    at_import, anywhere = imports(modules, deferred=False), imports(modules, deferred=True)
    return {
        "large_folders": [f"{folder}: {count}" for folder, count in folders(modules).items() if count > FOLDER_FILES],
        "circles": [" <-> ".join(circle) for circle in circles(at_import)],
        "any_circles": [" <-> ".join(circle) for circle in circles(anywhere)],
        "up_arrows": up_arrows(anywhere),
        "appendices": appendices(modules, anywhere),
    }


def main() -> None:
    """Print the counts, or all figures."""
    parser = argparse.ArgumentParser(description="Measure the shape of the tree.")
    parser.add_argument("--json", action="store_true", help="print the names as well, as JSON")
    arguments = parser.parse_args()
    figures = measure()
    if arguments.json:
        print(json.dumps(asdict(figures), indent=1))
    else:
        print("\n".join(f"{name:34}{count:6}" for name, count in figures.counts.items()))


if __name__ == "__main__":
    main()
