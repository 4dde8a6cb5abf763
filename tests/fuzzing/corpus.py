"""Inputs that are kept: those that reach something new, as short as they were found, one a line in base64.

    tests/fuzzing/corpus/NAME.txt

A file holds at most `MOST_INPUTS` of at most `MOST_BYTES`: those that fuzzing found last begin the next search, and `make test`
replays them. The whole corpus of a machine stays in its cache.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")
MOST_INPUTS, MOST_BYTES = 60, 300


def read(name: str) -> list[bytes]:
    """Return the kept inputs of a target."""
    path = FOLDER / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text("ascii").split()] if path.is_file() else []


def write(name: str, inputs: Iterable[bytes]) -> None:
    """Keep inputs of a target beside those that were kept before; the shortest, where there are too many."""
    kept = {data for data in (*read(name), *inputs) if len(data) <= MOST_BYTES}
    chosen = sorted(sorted(kept, key=lambda data: (len(data), data))[:MOST_INPUTS])
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.txt").write_text("".join(f"{base64.b64encode(data).decode()}\n" for data in chosen), "ascii")


def put(folder: Path, inputs: Iterable[bytes]) -> None:
    """Write inputs as files, which is how a fuzzer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
