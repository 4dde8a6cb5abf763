"""Log lines that machines and people can read."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
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


async def _says(logger: logging.Logger) -> None:
    logger.info("inside")
