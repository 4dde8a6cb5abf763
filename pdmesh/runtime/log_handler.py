"""A handler whose lines a thread writes: whoever logs never waits for the file, pipe or terminal behind it.

A pipe to a collector that stands still, or a disk that does, would otherwise stop the event loop at the next line, and with it
everything that the process serves. Lines that wait are bounded; what is lost is counted, and said when there is room again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque

MOST_WAITING = 2000  # lines: some 300 kB
FLUSH_S = 1.0
RETRY_S = 0.05


class BackgroundHandler(logging.Handler):
    """Format lines at once, and have a thread write them to a file descriptor, in order.

    The process waits for the thread at its end, for `FLUSH_S` at most (`logging.shutdown` calls `flush`). It is the descriptor
    that is written to, and not `sys.stderr`: a thread that hangs in there would have Python abort at its end."""

    def __init__(self, descriptor: int, most_waiting: int = MOST_WAITING) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._most_waiting = most_waiting
        self._lines = deque[str]()
        self._num_lost = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and queue its line, or count it as lost."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  a line that cannot be formatted is no reason to fail
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) >= self._most_waiting:
                self._num_lost += 1
                return
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, for `FLUSH_S` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, FLUSH_S)

    def _run(self) -> None:
        while True:
            lines = self._take()
            self._write("".join(f"{line}\n" for line in lines).encode(errors="replace"))

    def _take(self) -> list[str]:
        """Wait for lines, and return them, with one about those that are missing behind them."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._lines))
            self._is_writing = True
            lines, num_lost = list(self._lines), self._num_lost
            self._lines.clear()
            self._num_lost = 0
        if num_lost:
            what = "%d lines were lost here: they came faster than they could be written"
            lines.append(self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, what, (num_lost,), None)))
        return lines

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk, a closed pipe
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # others may have made it so
                    with self._changed:
                        self._changed.wait(RETRY_S)
