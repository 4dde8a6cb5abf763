"""Log lines that machines and people can read."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import fcntl
import io
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pdmesh.runtime import log
from pdmesh.runtime.config import ConfigError


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.getLogger("some.part").setLevel(logging.NOTSET)


def lines(format_: log.Format, env: dict[str, str] | None = None) -> list[str]:
    stream = io.StringIO()
    log.configure("router", format_=format_, env=env or {}, stream=stream)
    logger = logging.getLogger("some.part")
    logger.debug("details")
    logger.info("took %s over", "w1", extra={"fields": {"epoch": 7, "why": "it died", "message": "clash"}})
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("line\nbreak")
    return stream.getvalue().splitlines()


def test_json_is_one_object_a_line() -> None:
    first, second = (json.loads(line) for line in lines("json"))
    assert first["service"] == "router"
    assert (first["level"], first["logger"], first["message"]) == ("info", "some.part", "took w1 over")
    assert (first["epoch"], first["why"], first["message_"]) == (7, "it died", "clash")
    assert second["message"] == "line\nbreak"
    assert "KeyError" in second["traceback"]


def test_text_is_one_line_an_event_with_its_fields() -> None:
    first, second, *traceback = lines("text")
    assert first.endswith(' info router some.part: took w1 over epoch=7 why="it died" message_=clash')
    assert second.endswith(r" error router some.part: line\nbreak")
    assert traceback[-1] == "KeyError: 'x'"


def test_levels_come_from_the_environment() -> None:
    assert len(lines("json", {"PDMESH_LOG": "error"})) == 1
    assert len(lines("json", {"PDMESH_LOG": "error,some.part=debug"})) == 3


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ConfigError, match=r"PDMESH_LOG: 'loud' has no known level; give debug\|info"):
        log.configure("router", env={"PDMESH_LOG": "loud"})


async def test_lines_about_a_traced_request_name_its_trace_also_in_tasks_that_it_starts() -> None:
    stream = io.StringIO()
    log.configure("router", format_="json", env={}, stream=stream)
    logger = logging.getLogger("some.part")

    async def request(trace: str) -> None:
        log.belongs_to(trace)
        logger.info("begun")
        await asyncio.create_task(_says(logger))

    await asyncio.gather(*(asyncio.create_task(request(trace)) for trace in ("abc", "", "def")))
    logger.info("of nobody")
    said = [(line["message"], line.get("trace_id")) for line in map(json.loads, stream.getvalue().splitlines())]
    begun = [("begun", trace) for trace in ("abc", None, "def")]
    assert said == [*begun, *[("inside", trace) for _, trace in begun], ("of nobody", None)]


def test_a_line_about_another_request_names_that_ones_trace() -> None:
    stream = io.StringIO()
    log.configure("router", format_="json", env={}, stream=stream)
    logger = logging.getLogger("some.part")

    def said_by_a_task_of(own: str) -> list[str | None]:
        log.belongs_to(own)
        for trace in ("abc", ""):
            with log.about(trace):
                logger.info("about it")
        logger.info("of its own")
        return [json.loads(line).get("trace_id") for line in stream.getvalue().splitlines()[-3:]]

    for own in ("", "def"):
        assert contextvars.copy_context().run(said_by_a_task_of, own) == ["abc", None, own or None]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of 4096 bytes, as reader and writer."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    os.close(writer)
    os.close(reader)


def handler_on(writer: int, most_bytes: int = 1 << 20) -> log.BackgroundHandler:
    handler = log.BackgroundHandler(writer, most_bytes)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "", 0, text, None, None)


def read_until(reader: int, end: str) -> str:
    """Read from a pipe until what came ends so. Raises TimeoutError."""
    got, ends_at, readable = "", time.monotonic() + 60, select.poll()  # select() knows the first 1 024 descriptors alone
    readable.register(reader, select.POLLIN)
    while not got.endswith(end):
        if time.monotonic() > ends_at or not readable.poll(60_000):
            raise TimeoutError(got)
        got += os.read(reader, 4096).decode()
    return got


def accounted_for(text: str) -> int:
    """Return how many lines came or are said to be lost."""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return sum(int(line.split()[0]) if "lost" in line else 1 for line in whole)


def test_lines_are_written_in_order_by_the_time_of_a_flush(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = handler_on(writer)
    for number in range(50):
        handler.handle(record(f"line {number}"))
    assert read_until(reader, "line 49\n").splitlines() == [f"line {number}" for number in range(50)]


def test_no_line_waits_for_a_pipe_that_is_not_read_and_what_is_lost_is_counted(pipe: tuple[int, int]) -> None:
    """Twenty kilobytes into a pipe of four: with a handler that writes itself this test would not end."""
    reader, writer = pipe
    handler = handler_on(writer, 3000)
    for number in range(200):
        handler.handle(record(f"line {number}".ljust(99)))
    got = ""
    while accounted_for(got) < 200:
        got += read_until(reader, "\n")
    assert "lost" in got and accounted_for(got) == 200
    numbers = [int(line.split()[1]) for line in got.splitlines() if line.startswith("line")]
    assert numbers == sorted(set(numbers)) and numbers[0] == 0
    handler.handle(record("afterwards"))
    assert read_until(reader, "\n") == "afterwards\n"


def test_lines_that_a_full_disk_loses_are_counted(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pipe
    handler = handler_on(writer)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", raise_no_space)
        handler.handle(record("lost one"))
        handler.flush()
    handler.handle(record("kept"))
    assert read_until(reader, "came\n").splitlines()[0] == "kept"
    assert handler._num_lost == 0


def raise_no_space(descriptor: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_that_finds_no_thread_waits_for_the_next(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pipe
    handler = handler_on(writer)
    monkeypatch.setattr(handler, "handleError", lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raise_no_thread)
        handler.handle(record("first"))
    handler.handle(record("second"))
    assert read_until(reader, "second\n") == "first\nsecond\n"


def raise_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_process_whose_stderr_is_closed_starts() -> None:
    code = "from pdmesh.runtime import log; import logging, sys; log.configure('x', env={}); logging.error('x'); sys.exit(7)"
    assert subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], timeout=60, check=False).returncode == 7


def test_a_line_of_another_process_is_passed_on_as_it_is(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    logging.root.handlers[:] = [handler_on(writer)]
    log.pass_on("2026 info a child: said this")
    assert read_until(reader, "\n") == "2026 info a child: said this\n"


def test_a_process_whose_log_stands_still_goes_on_and_ends(pipe: tuple[int, int]) -> None:
    """Its exit code is its own: Python does not abort because a thread hangs in its standard error."""
    _, writer = pipe
    process = subprocess.run([sys.executable, "-c", CHATTY], stdout=subprocess.PIPE, stderr=writer, timeout=60, check=False)
    assert (process.returncode, process.stdout) == (7, b"done\n")


CHATTY = """
import logging, sys
from pdmesh.runtime import log
log.configure("chatty", env={})
for number in range(5000):
    logging.getLogger("x").info("line %d", number)
print("done", flush=True)
sys.exit(7)
"""


async def _says(logger: logging.Logger) -> None:
    logger.info("inside")
