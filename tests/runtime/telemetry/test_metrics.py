"""Instruments, their bounds, and the port that shows them: asked by real connections, polite and hostile."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry import metrics_exporters
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.metrics import OFF, Metrics, Readings, counter, gauge, histogram
from pdmesh.runtime.telemetry.metrics_registry import MAX_VALUES, OTHER, LabelGuard, Registry
from pdmesh.runtime.telemetry.open_metrics import open_metrics
from tests.runtime.telemetry.scrape import Page, scrape

ASKED = counter("pdmesh.asked", "Questions", ("tenant",))
TOOK = histogram("gen_ai.took", "How long", (0.1, 1.0), ("gen_ai.request.model",), unit="s")
WIDE = gauge("pdmesh.wide", "How wide", ("tenant",), unit="By")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@asynccontextmanager
async def shown() -> AsyncIterator[tuple[Metrics, str]]:
    metrics = open_metrics(TelemetryConfig(metrics_port=0), "pdmesh-test", {"service.instance.id": "t-0"}, {}, host="127.0.0.1")
    try:
        yield metrics, await metrics.start()
    finally:
        await metrics.stop()


async def look(url: str, accept: str | None = None) -> Page:
    return await asyncio.to_thread(scrape, url, *([accept] if accept is not None else []))


async def test_counts_measures_and_reads_at_the_time_of_the_look() -> None:
    width = 3.0
    async with shown() as (metrics, url):
        metrics.add(ASKED, 2, "a")
        metrics.observe(TOOK, 0.5, "smollm2", trace=TRACE)
        metrics.read_by(lambda readings: readings.put(WIDE, width, "a"))
        width = 4.0
        page = await look(url)
    assert page.kind.startswith("application/openmetrics-text")
    assert page.value("pdmesh_asked_total", tenant="a") == 2
    assert page.value("pdmesh_wide_bytes", tenant="a") == 4
    assert page.value("gen_ai_took_seconds_bucket", gen_ai_request_model="smollm2", le="0.1") == 0
    assert page.value("gen_ai_took_seconds_count", gen_ai_request_model="smollm2") == 1
    assert page.value("pdmesh_info", service="pdmesh-test", instance="t-0") == 1
    assert page.value("process_resident_memory_bytes") > 1e6


async def test_a_bucket_names_the_trace_that_fell_into_it() -> None:
    async with shown() as (metrics, url):
        metrics.observe(TOOK, 0.5, "m", trace=TRACE)
        metrics.observe(TOOK, 0.05, "m")
        buckets = {s.labels["le"]: s.exemplar for s in (await look(url)).samples if s.name == "gen_ai_took_seconds_bucket"}
    exemplar = buckets["1.0"]
    assert exemplar is not None and exemplar.labels == {"trace_id": TRACE} and exemplar.value == 0.5
    assert buckets["0.1"] is None


async def test_who_does_not_ask_for_openmetrics_gets_plain_text() -> None:
    async with shown() as (metrics, url):
        metrics.add(ASKED, 1, "a")
        page = await look(url, "text/plain")
    assert page.kind.startswith("text/plain")
    assert {"pdmesh_asked"} <= {family.name for family in text_string_to_metric_families(page.text)}


async def test_a_reader_that_fails_takes_nothing_from_the_others() -> None:
    def broken(readings: Readings) -> None:
        raise ZeroDivisionError

    async with shown() as (metrics, url):
        metrics.read_by(broken)
        metrics.read_by(lambda readings: readings.put(WIDE, 1, "a"))
        assert (await look(url)).value("pdmesh_wide_bytes") == 1


@given(st.lists(st.floats(-10, 10), max_size=60), st.lists(st.floats(-5, 5), min_size=1, max_size=8, unique=True).map(sorted))
def test_each_value_is_in_the_first_bucket_that_it_fits(values: list[float], bounds: list[float]) -> None:
    registry, size = Registry(), histogram("pdmesh.size", "Size", tuple(bounds))
    for value in values:
        registry.observe(size, value, (), "")
    samples = [sample for family in registry.families() for sample in family.samples if sample.name == "pdmesh_size_bucket"]
    wanted = [sum(value <= bound for value in values) for bound in bounds]
    assert [sample.value for sample in samples] == ([*wanted, len(values)] if values else [])


def test_threads_lose_nothing() -> None:
    registry, num_threads = Registry(), 8

    def count() -> None:
        for _ in range(2000):
            registry.add(ASKED, 1, ("a",))
            registry.observe(TOOK, 0.5, ("m",), "")

    threads = [threading.Thread(target=count) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = {sample.name: sample.value for family in registry.families() for sample in family.samples}
    assert values["pdmesh_asked_total"] == values["gen_ai_took_seconds_count"] == num_threads * 2000


@given(st.lists(st.text(max_size=200), max_size=300))
def test_a_label_has_so_many_values_and_no_more(values: list[str]) -> None:
    guard = LabelGuard()
    folded = [guard.fold(("tenant",), (value,))[0] for value in values]
    assert len(set(folded)) <= MAX_VALUES + 1
    assert all(shown in (value, OTHER) for shown, value in zip(folded, values, strict=True))
    assert folded == [guard.fold(("tenant",), (value,))[0] for value in values], "who is told apart once stays so"


def test_sets_of_labels_have_an_end_though_each_label_is_within_bounds() -> None:
    registry = Registry(max_series=5)
    pair = counter("pdmesh.pairs", "Pairs", ("a", "b"))
    for number in range(40):
        registry.add(pair, 1, (str(number % 8), str(number % 5)))
    samples = [sample for family in registry.families() if family.name == "pdmesh_pairs" for sample in family.samples]
    assert len(samples) == 6 and sum(sample.value for sample in samples) == 40


async def test_readings_that_are_folded_add_up() -> None:
    async with shown() as (metrics, url):
        metrics.read_by(_read_many)
        page = await look(url)
    assert page.value("pdmesh_wide_bytes", tenant=OTHER) == 100 - MAX_VALUES
    assert page.value("pdmesh_wide_bytes") == 100


def _read_many(readings: Readings) -> None:
    for number in range(100):
        readings.put(WIDE, 1, f"t{number}")


def test_off_is_nothing() -> None:
    assert open_metrics(TelemetryConfig(), "s", {}, {}, host="127.0.0.1") is OFF
    OFF.add(ASKED, 1, "a")
    OFF.observe(TOOK, 1.0, "m")


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = TelemetryConfig(metrics_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="--metrics-port"):
            await open_metrics(config, "s", {}, {}, host="127.0.0.1").start()


def _raw(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def _port(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"400"),
        (b"HEAD /metrics?a=b HTTP/1.1\r\nAccept: */*\r\n\r\n", b"200"),
    ],
)
async def test_other_requests(sent: bytes, status: bytes) -> None:
    async with shown() as (_, url):
        try:
            answer = await asyncio.to_thread(_raw, _port(url), sent)
        except ConnectionResetError:  # it hung up before all of the garbage was taken
            assert status == b"400"
            return
    assert answer.split(b" ")[1] == status


async def test_who_holds_connections_open_keeps_nobody_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_exporters, "TIMEOUT_S", 0.3)
    async with shown() as (_, url):
        idle = [socket.create_connection(("127.0.0.1", _port(url))) for _ in range(3 * metrics_exporters.MAX_CONNECTIONS)]
        try:
            ended = await asyncio.gather(*(asyncio.to_thread(_until_closed, connection) for connection in idle))
            assert all(ended)
            assert (await look(url)).value("pdmesh_info") == 1
        finally:
            for connection in idle:
                connection.close()


def _until_closed(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_who_asks_again_at_once_gets_what_was_made_before() -> None:
    num_looks = 0

    def count(readings: Readings) -> None:
        nonlocal num_looks
        num_looks += 1

    async with shown() as (metrics, url):
        metrics.read_by(count)
        await asyncio.gather(*(look(url) for _ in range(8)))
        seen = num_looks
    assert seen < 8


async def test_a_process_that_is_busy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_exporters, "READ_TIMEOUT_S", 0.1)
    async with shown() as (_, url):
        answer = _raw(_port(url), b"GET /metrics HTTP/1.1\r\n\r\n")  # on the event loop, which answers nobody meanwhile
    assert answer.startswith(b"HTTP/1.1 503")
