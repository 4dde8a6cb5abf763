"""How deep the definitions of a grammar lead into each other. llguidance recurses along them, and a stack that overflows takes
the whole process with it: a few KB of `$ref` after `$ref` would do. So a grammar that is too deep is refused, and what is not is
compiled on a stack that surely suffices (some 10 KB a level were measured)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import unquote

T = TypeVar("T")

MAX_DEPTH = 3000
STACK_BYTES = 256 << 20  # of addresses: memory is what is used of it, until the thread ends

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_stack_size = threading.Lock()


def check_schema_depth(schema: object) -> None:
    """Raises ValueError when following every reference of a JSON schema once may lead deeper than MAX_DEPTH."""
    depth, seen, ahead = 0, set[str](), ["#"]
    while ahead:
        reference = ahead.pop()
        if reference in seen:
            continue
        seen.add(reference)
        target_depth, references = _survey(_resolve(schema, reference))
        depth += target_depth
        _check(depth)
        ahead += references


def check_lark_depth(source: str) -> None:
    """Raises ValueError when a Lark grammar defines so much that its rules, and schemas within, may lead too deep: each step
    down has a colon, as a rule's or a member's."""
    _check(source.count(":"))


def with_deep_stack(work: Callable[[], T]) -> T:
    """The result of `work`, which may recurse as deep as the checks above allow."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the caller
            errors.append(error)

    with _stack_size:  # of the threads that are started from now on: all of the process's
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar-stack", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _check(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"its definitions may lead more than {MAX_DEPTH} levels deep; make it flatter")


def _survey(root: object) -> tuple[int, list[str]]:
    """How deep a value is nested, and the references in it. No recursion: a value may be nested as deep as Python can parse."""
    deepest, references, ahead = 0, list[str](), [(root, 1)]
    while ahead:
        value, depth = ahead.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            references += [each for key, each in value.items() if key in _REFERENCES and isinstance(each, str)]
            ahead += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            ahead += [(each, depth + 1) for each in value]
    return deepest, references


def _resolve(schema: object, reference: str) -> object:
    """What a reference names; the whole schema if it is none of "#/path", so that its depth counts at least."""
    value = schema
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return schema
    return value
