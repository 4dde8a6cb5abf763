"""API keys in a file: {"keys": [{"hash": …, "name": …, "tenant": …, "created": …}, …]}.

Written by `pdmesh keys`: atomically, under a lock that serializes writers, readable by its owner alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from router.auth.api_keys import ApiKey, KeyProblem, KeyTable

MODE = 0o600


def read_key_file(path: Path) -> KeyTable:
    """Raises OSError, and KeyProblem naming key and field."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise KeyProblem(f"{path} is no JSON: {error}") from error
    listed = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise KeyProblem(f"{path}: keys: must be a list")
    return KeyTable(_parsed(path, number, value) for number, value in enumerate(listed))


def update(path: Path, change: Callable[[KeyTable], KeyTable]) -> KeyTable:
    """Replace the file's table by `change` of it; a file that is not there is an empty table. Raises as `read`."""
    with _locked(path):
        table = change(read_key_file(path) if path.exists() else KeyTable())
        _write(path, json.dumps({"keys": [json.loads(key.to_json()) for key in table]}, indent=1) + "\n")
        return table


def _parsed(path: Path, number: int, value: object) -> ApiKey:
    try:
        return ApiKey.from_value(value)
    except KeyProblem as error:
        raise KeyProblem(f"{path}: keys[{number}].{error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock is a file of its own: the file itself is replaced."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, text: str) -> None:
    """All or nothing, also when the power goes; mkstemp makes files that only their owner reads."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
