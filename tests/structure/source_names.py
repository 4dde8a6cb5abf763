"""Names that stand in no table, read from the syntax trees of product code: string literals and arguments of functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Folders of product code, before and after the restructuring: those that exist are read.
PRODUCT = (
    "pdmesh", "router", "prefill_service", "decode_service", "kvtransfer", "worker", "autoscaler", "simulator", "planning",
    "runtime", "engine", "text",
)  # fmt: skip
ENVIRONMENT = "environment variables"
VARIABLE = re.compile(r"(?:PDMESH|OTEL)_[A-Z0-9_]*[A-Z0-9]")
# Kind of name → the string literals that are one; {} stands for a replaced field of an f-string.
_LITERALS = {
    ENVIRONMENT: VARIABLE,
    "dotted names": re.compile(r"(?:pdmesh|gen_ai)\.[a-z0-9_.{}/-]+"),  # of attributes and metrics, and of some files
    "hyphenated names": re.compile(r"pdmesh(?:-[a-z]+)+"),  # of services and Kubernetes' objects
    "headers": re.compile(r"[xX](?:-[A-Za-z]+)+"),
    "HTTP routes": re.compile(r"/metrics"),
    "Redis keys": re.compile(r"pdmesh:\{\}:[\w{}:.]+"),
}
# Kind of name → the functions whose first argument is one.
_ARGUMENTS = {
    "failpoints": ("hit", "hit_async"),
    "spans and their events": ("begin", "record", "event", "_part", "Event"),
    "HTTP routes": ("Route", "_get"),
    "arguments of argparse programs": ("add_argument",),
}
_ENVIRONMENTS = ("os.environ", "environ", "env", "environment")


def collect() -> dict[str, set[str]]:
    """Names by their kind."""
    names: dict[str, set[str]] = {section: set() for section in (*_LITERALS, *_ARGUMENTS)}
    for path in (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = dict(_constants(tree))
        for node in ast.walk(tree):
            for section, name in (*_literal(node), *_argument(node, constants)):
                names[section].add(name)
    return names


@cache
def is_module(name: str) -> bool:
    """Whether an import takes this name."""
    path = ROOT / name.strip(".").replace(".", "/")
    return path.is_dir() or path.with_name(f"{path.name}.py").is_file()


def is_program(name: str) -> bool:
    """Whether `python -m` takes this name."""
    return is_module(f"{name}.__main__") or (is_module(name) and not (ROOT / name.replace(".", "/")).is_dir())


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Those of a module that are texts."""
    for statement in tree.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and (text := _text(statement.value)) is not None:
            yield target.id, text


def _literal(node: ast.AST) -> Iterator[tuple[str, str]]:
    text = _text(node)
    for section, pattern in _LITERALS.items():
        if text is not None and pattern.fullmatch(text) and not is_module(text):
            yield section, text


def _argument(node: ast.AST, constants: dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in _ENVIRONMENTS:
        yield from ((ENVIRONMENT, key) for key in [_text(node.slice, constants)] if key)
    if not isinstance(node, ast.Call) or not node.args or not (name := _text(node.args[0], constants)):
        return
    function = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    if isinstance(node.func, ast.Attribute) and function == "get" and ast.unparse(node.func.value) in _ENVIRONMENTS:
        yield ENVIRONMENT, name
    for section, functions in _ARGUMENTS.items():
        if function in functions and (section != "HTTP routes" or name.startswith("/")):
            methods = next((keyword.value for keyword in node.keywords if keyword.arg == "methods"), None)
            yield section, " ".join([*(ast.literal_eval(methods) if methods else ()), name])


def _text(node: ast.AST, constants: dict[str, str] | None = None) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return (constants or {}).get(node.id)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return None
