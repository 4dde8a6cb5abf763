"""Structured logs on stderr: one line for each event, as `key=value` text or JSON.

Call `configure` once at the start, then use the standard library's loggers. More fields: `logger.info("took over",
extra={"fields": {"epoch": 7}})`. Lines about a traced request have its `trace_id`. The level comes from PDMESH_LOG, such as
"info" or "info,kvtransfer=debug". Logs never hold prompts, outputs or token ids.

A thread writes the lines: the code that logs never waits for the file, pipe or terminal behind stderr. A collector that stands
still, or a disk that does, would otherwise stop the event loop at the next line, and with it everything that the process serves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

from pdmesh.runtime.config import ConfigError

VARIABLE = "PDMESH_LOG"
Format = Literal["text", "json"]
_trace: ContextVar[str] = ContextVar("trace", default="")
_BENEATH_PDMESH = frozenset({"autoscaler", "engine", "planning", "runtime", "simulator", "text", "worker"})
"""Packages whose loggers may be named without `pdmesh.`: `PDMESH_LOG=engine=debug`."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(
    service: str, *, format_: Format = "text", env: Mapping[str, str] | None = None, stream: TextIO | None = None
) -> None:
    """Send all logs to stderr, naming `service`; to `stream`, where one is given, at once. Raises ConfigError for a PDMESH_LOG
    that cannot be read."""
    levels = parse_levels((os.environ if env is None else env).get(VARIABLE, ""))
    handler = _to_stderr() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(service) if format_ == "json" else TextFormatter(service))
    logging.root.handlers[:] = [handler]
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
        if name.partition(".")[0] in _BENEATH_PDMESH:
            logging.getLogger(f"pdmesh.{name}").setLevel(level)


def pass_on(line: str) -> None:
    """Write a line of another process as it is, where the logs of this one go."""
    for handler in logging.root.handlers:
        if isinstance(handler, BackgroundHandler):
            handler.put(line)
            return
    print(line, file=sys.stderr, flush=True)


def belongs_to(trace: str) -> None:
    """Add the trace to the logs of this task from now on, and of tasks that it starts; "" for none."""
    _trace.set(trace)


@contextlib.contextmanager
def about(trace: str) -> Iterator[None]:
    """Add the trace to the logs within, whatever the task's own is; "" for none."""
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)


def parse_levels(text: str) -> dict[str, int]:
    """Return the level by logger; "" is the root's. Raises ConfigError."""
    levels = {"": logging.INFO}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, level = part.rpartition("=")
        if level.lower() not in LEVELS:
            remedy = f"give {'|'.join(LEVELS)}, or logger=level, comma-separated"
            raise ConfigError(VARIABLE, f"{part[:80]!r} has no known level", remedy)
        levels[name] = LEVELS[level.lower()]
    return levels


class _Formatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := _trace.get():
            fields["trace_id"] = trace
        extra = getattr(record, "fields", None)
        if isinstance(extra, dict):
            fields.update((f"{key}_" if key in fields else str(key), value) for key, value in extra.items())
        if record.exc_info and record.exc_info[0] is not None:
            fields["traceback"] = self.formatException(record.exc_info)
        return fields


class JsonFormatter(_Formatter):
    """Format a record as one JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return json.dumps(self._fields(record), default=str)


class TextFormatter(_Formatter):
    """Format a record as `time level service logger: message key=value ...`; a traceback follows on its own lines, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with control characters of a message escaped so that nothing in it can look like another event."""
        fields = self._fields(record)
        traceback = fields.pop("traceback", None)
        head = " ".join(str(fields.pop(key)) for key in ("time", "level", "service", "logger"))
        message = _one_line(str(fields.pop("message")))
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        return f"{head}: {message}{pairs}" + (f"\n{traceback}" if traceback else "")


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and all(char.isprintable() and char not in ' "=' for char in text) else json.dumps(text)


# The handler whose lines a thread writes

MOST_BYTES = 1 << 20
"""How many bytes of lines may wait. More are lost, which a line says when they can be written again."""
FLUSH_S = 1.0
RETRY_S = 0.05


def _to_stderr() -> logging.Handler:
    try:
        return BackgroundHandler(sys.stderr.fileno())
    except (AttributeError, OSError):  # it is closed, or no file
        return logging.StreamHandler(sys.stderr)


class BackgroundHandler(logging.Handler):
    """Format lines at once, and have a thread write them to a file descriptor, in order.

    The process waits for the thread at its end, for `FLUSH_S` at most (`logging.shutdown` calls `flush`). It is the descriptor
    that is written to, and not `sys.stderr`: a thread that hangs in there would have Python abort at its end."""

    def __init__(self, descriptor: int, most_bytes: int = MOST_BYTES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._lines = deque[bytes]()
        self._num_bytes = 0  # of them
        self._num_lost = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and queue its line. Raises nothing."""
        try:
            self.put(self.format(record))
        except Exception:  # noqa: BLE001  a line that cannot be formatted, or no thread to write it, is no reason to fail
            self.handleError(record)

    def put(self, line: str) -> None:
        """Queue a line, or count it as lost. Raises RuntimeError where the system gives no thread: it waits for the next line."""
        data = f"{line}\n".encode(errors="replace")
        with self._changed:
            if self._num_bytes + len(data) > self._most_bytes:
                self._num_lost += 1
                return
            self._lines.append(data)
            self._num_bytes += len(data)
            if self._thread is None or not self._thread.is_alive():  # it does not survive a fork
                thread = threading.Thread(target=self._run, name="log", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, for `FLUSH_S` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, FLUSH_S)

    def _run(self) -> None:
        while True:
            lines, num_lost = self._take()
            try:
                self._write(b"".join((*lines, *([self._line_about(num_lost)] if num_lost else []))))
            except Exception:  # noqa: BLE001  a full disk, a closed pipe, no memory: the thread goes on
                with self._changed:
                    self._num_lost += num_lost + len(lines)

    def _take(self) -> tuple[list[bytes], int]:
        """Wait for lines; return them, and how many are missing behind them."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._lines))
            self._is_writing = True
            lines, num_lost = list(self._lines), self._num_lost
            self._lines.clear()
            self._num_bytes = self._num_lost = 0
        return lines, num_lost

    def _line_about(self, num_lost: int) -> bytes:
        what = "%d lines were lost here: they could not be written, or not as fast as they came"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, what, (num_lost,), None)
        return f"{self.format(record)}\n".encode()

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process may have made it so
                with self._changed:
                    self._changed.wait(RETRY_S)
