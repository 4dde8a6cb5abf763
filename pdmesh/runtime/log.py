"""Structured logs on stderr: one line for each event, as `key=value` text or JSON.

Call `configure` once at the start, then use the standard library's loggers. More fields: `logger.info("took over",
extra={"fields": {"epoch": 7}})`. Lines about a traced request have its `trace_id`. The level comes from PDMESH_LOG, such as
"info" or "info,kvtransfer=debug". Logs never hold prompts, outputs or token ids.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.log_handler import BackgroundHandler

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
    handler = BackgroundHandler(sys.stderr.fileno()) if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(service) if format_ == "json" else TextFormatter(service))
    logging.root.handlers[:] = [handler]
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
        if name.partition(".")[0] in _BENEATH_PDMESH:
            logging.getLogger(f"pdmesh.{name}").setLevel(level)


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
