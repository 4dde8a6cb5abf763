"""An upload, from the bytes of a multipart body to a file: pieces are written as they arrive."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

from starlette.requests import ClientDisconnect, Request

from router.api.http.errors import HttpError
from router.api.http.multipart import MultipartParser, PartBegun, boundary_of

PIECE_TIMEOUT_S = 60.0
TOTAL_TIMEOUT_S = 3600.0
WRITE_BYTES = 1 << 20
MAX_FIELD_BYTES = 1024
FORM_BYTES = 64 << 10
"""What a form may have besides its file."""


@dataclass
class Form:
    """Hold what a form said. `filename` and `size` are of its part `file`; None: there is none."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0


async def receive(request: Request, path: Path, max_bytes: int) -> Form:
    """Write the part `file` of a form to `path`, and return the rest. Raises HttpError, OSError; the caller deletes the file."""
    parser = MultipartParser(boundary_of(request.headers.get("content-type", "")))
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes + FORM_BYTES:
        _refuse_size(max_bytes)
    file = await asyncio.to_thread(_open, path)
    try:
        form = await _read(request, parser, _Writer(file, max_bytes))
        await asyncio.to_thread(_settle, file)
    finally:
        file.close()
    return form


class _Writer:
    """Collects pieces of the file, and writes them in a thread."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._waiting = bytearray()
        self.size = 0

    def add(self, piece: bytes) -> None:
        self._waiting += piece
        self.size += len(piece)
        if self.size > self._max_bytes:
            _refuse_size(self._max_bytes)

    async def write(self, least: int = 1) -> None:
        """Write what waits, if it is `least` bytes."""
        if len(self._waiting) >= least:
            waiting, self._waiting = self._waiting, bytearray()
            await asyncio.to_thread(self._file.write, waiting)


class _FormReader:
    """Sorts the parts of a form."""

    def __init__(self, writer: _Writer) -> None:
        self.form = Form()
        self._writer = writer
        self._part = PartBegun("", None)
        self._fields: dict[str, bytearray] = {}

    def take(self, event: PartBegun | bytes) -> None:
        if isinstance(event, PartBegun):
            self._begin(event)
        elif self._part.name == "file":
            self._writer.add(event)
        else:
            value = self._fields[self._part.name]
            value += event
            if len(value) > MAX_FIELD_BYTES:
                raise HttpError(400, f"{self._part.name[:40]}: has more than {MAX_FIELD_BYTES} bytes", param=self._part.name[:40])

    def _begin(self, part: PartBegun) -> None:
        self._part = part
        if part.name in self._fields or (part.name == "file" and self.form.filename is not None):
            raise HttpError(400, f"{part.name[:40]}: is sent twice", param=part.name[:40])
        if part.name == "file":
            self.form.filename = part.filename or "file"
        else:
            self._fields[part.name] = bytearray()

    def finished(self) -> Form:
        self.form.fields = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        self.form.size = self._writer.size
        return self.form


async def _read(request: Request, parser: MultipartParser, writer: _Writer) -> Form:
    reader = _FormReader(writer)
    try:
        async with asyncio.timeout(TOTAL_TIMEOUT_S):
            async for piece in _pieces(request):
                for event in parser.feed(piece):
                    reader.take(event)
                await writer.write(WRITE_BYTES)
    except TimeoutError:
        raise HttpError(
            408, f"no part of the body arrived for {PIECE_TIMEOUT_S:g} s, or not all in {TOTAL_TIMEOUT_S:g} s"
        ) from None
    except ClientDisconnect:
        raise HttpError(400, "the body is not complete") from None
    parser.finish()
    await writer.write()
    return reader.finished()


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(PIECE_TIMEOUT_S):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        yield piece


def _open(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def drop(path: Path) -> None:
    """Delete what is left of an upload."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _refuse_size(max_bytes: int) -> NoReturn:
    raise HttpError(413, f"file: has more than {max_bytes} bytes (http_batch_file_bytes); make several files of it", param="file")
