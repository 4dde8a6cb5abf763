"""The messages that send files of weights to a mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdmesh.v1 import worker_pb2

PIECE_BYTES = 1 << 20


def files_of(folder: Path) -> tuple[list[Path], int]:
    """Return the files of weights in a folder, and their bytes together. Raises ValueError without any."""
    files = sorted(path for path in folder.glob("*.safetensors*") if path.name.endswith((".safetensors", ".index.json")))
    num_bytes = sum(path.stat().st_size for path in files)
    if not num_bytes:
        raise ValueError(f"folder: {str(folder)!r} has no .safetensors files")
    return files, num_bytes


def messages_of(files: Sequence[Path], num_bytes: int, model: str) -> Iterator[worker_pb2.SendWeightsRequest]:
    """Yield the messages that send these files. Raises OSError."""
    digest = hashlib.sha256()
    head = worker_pb2.SendWeightsRequest(model=model, num_bytes=num_bytes)
    for path in files:
        head.file = path.name
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                head.data = piece
                yield head
                head = worker_pb2.SendWeightsRequest()
    yield worker_pb2.SendWeightsRequest(sha256=digest.digest())


class Readable:
    """Iterate over messages, and remember the `error` that ended them: gRPC only says that the call was cancelled."""

    def __init__(self, messages: Iterator[worker_pb2.SendWeightsRequest]) -> None:
        self._messages = messages
        self.error: OSError | None = None

    def __iter__(self) -> Readable:
        return self

    def __next__(self) -> worker_pb2.SendWeightsRequest:
        try:
            return next(self._messages)
        except OSError as error:
            self.error = error
            raise
