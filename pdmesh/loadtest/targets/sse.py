"""Server-sent events: bytes in pieces of any size, the data of complete events out. Pure. (WHATWG HTML, section 9.2.6.)"""

from __future__ import annotations

MAX_EVENT_BYTES = 1 << 20


class EventTooLarge(ValueError):
    """An event, or a line, of more than MAX_EVENT_BYTES: whoever sends one never ends."""


class SseParser:
    """Keeps what is incomplete. Fields other than `data` are not needed here and dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_bytes = 0  # of _data

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that this piece completes. Lines may end in LF or CR LF. Raises EventTooLarge."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._num_bytes += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._num_bytes = [], 0
        if len(self._rest) + self._num_bytes > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return events
