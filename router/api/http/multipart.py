"""Bodies of type multipart/form-data (RFC 7578), parsed as they arrive: nothing is held but what may be the start of a delimiter.

Starlette's own forms need a further package, and write every file to a temporary folder of the system before a handler sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from typing import NoReturn

from router.api.http.errors import HttpError

MAX_HEADER_BYTES = 8 << 10
MAX_PARTS = 32
_END = object()


@dataclass(frozen=True)
class PartBegun:
    """The head of a part has arrived. `filename` is None for a field of a form."""

    name: str
    filename: str | None


PartEvent = PartBegun | bytes
"""A part's head, then its data in pieces."""


def boundary_of(content_type: str) -> bytes:
    """Return the boundary. Raises HttpError for any other kind of body."""
    message = Message()
    message["content-type"] = content_type
    if message.get_content_type() != "multipart/form-data":
        shown = content_type.partition(";")[0].strip().lower()[:80]
        raise HttpError(415, f"content-type is {shown!r}; send multipart/form-data", param="Content-Type")
    boundary = str(message.get_param("boundary", "")).encode("latin-1", "replace")
    if not 1 <= len(boundary) <= 70:
        raise HttpError(400, "the boundary of multipart/form-data must have 1 to 70 characters", param="Content-Type")
    return boundary


class MultipartParser:
    """Turn the bytes of a body into events."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the first delimiter may stand at the very beginning
        self._state = self._preamble
        self._num_parts = 0
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[PartEvent]:
        """Yield what `data` completes. Raises HttpError with status 400."""
        self._buffer += data
        while (event := self._state()) is not None:
            if event is not _END:
                assert isinstance(event, PartBegun | bytes)
                yield event

    def finish(self) -> None:
        """Check that the body is complete. Raises HttpError with status 400."""
        if not self.is_complete:
            _refuse("the multipart body ends before its last delimiter")

    # Each state returns an event, `_END` where the next state may go on, or None: more bytes are needed.

    def _preamble(self) -> object | None:
        found = self._buffer.find(self._delimiter)
        if found < 0:
            del self._buffer[: max(0, len(self._buffer) - len(self._delimiter))]
            return None
        del self._buffer[: found + len(self._delimiter)]
        self._state = self._after_delimiter
        return _END

    def _after_delimiter(self) -> object | None:
        end = self._buffer.find(b"\r\n")
        if self._buffer.startswith(b"--"):
            self.is_complete, self._state = True, self._epilogue
            return _END
        if end < 0:
            if len(self._buffer) > MAX_HEADER_BYTES:
                _refuse("a delimiter of the multipart body is not followed by a line end")
            return None
        if self._buffer[:end].strip():
            _refuse("a delimiter of the multipart body is followed by other text")
        del self._buffer[:end]  # the line end stays: it may be the beginning of the empty line after no headers
        self._state = self._head
        return _END

    def _head(self) -> object | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_HEADER_BYTES or (end < 0 and len(self._buffer) > MAX_HEADER_BYTES):
            _refuse(f"the headers of a part have more than {MAX_HEADER_BYTES} bytes")
        if end < 0:
            return None
        head = bytes(self._buffer[2:end])
        del self._buffer[: end + 4]
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            _refuse(f"the multipart body has more than {MAX_PARTS} parts")
        self._state = self._data
        return _begun(head)

    def _data(self) -> object | None:
        found = self._buffer.find(self._delimiter)
        size = found if found >= 0 else len(self._buffer) - len(self._delimiter) + 1
        if found == 0:
            del self._buffer[: len(self._delimiter)]
            self._state = self._after_delimiter
            return _END
        if size <= 0:
            return None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _epilogue(self) -> object | None:
        self._buffer.clear()
        return None


def _begun(head: bytes) -> PartBegun:
    message = HeaderParser().parsestr(head.decode("utf-8", "replace"))
    name = message.get_param("name", None, "content-disposition")
    if message.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        _refuse("a part of the multipart body has no content-disposition: form-data with a name")
    if message.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        _refuse(f"part {name[:40]!r}: a content-transfer-encoding is not supported; send the bytes as they are")
    return PartBegun(name, message.get_filename())


def _refuse(problem: str) -> NoReturn:
    raise HttpError(400, problem)
