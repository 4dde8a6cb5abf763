"""Text for the terminal: widths, units, bars, colours, and the report of timings."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from pdmesh.client.types import Completed, PrefillMode, Timings, Usage
from pdmesh.commands.status import role_names, status_lines
from pdmesh.commands.timings import timings_report
from pdmesh.terminal import breakdown, console, duration, show, size, table
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from tests.support.terminal import Terminal, plain


def test_table_aligns_and_fits() -> None:
    lines = plain(table(("A", "LONG NAME"), [("1", "x"), ("22", "y" * 200)]), width=40)
    assert lines[0] == "A   LONG NAME"
    assert lines[1] == "1   x"
    assert max(map(len, lines)) == 40 and lines[2].endswith("…")


@pytest.mark.parametrize(("ns", "text"), [(0, "0 µs"), (850e3, "850 µs"), (12.34e6, "12.3 ms"), (1.25e9, "1.25 s")])
def test_duration(ns: float, text: str) -> None:
    assert duration(ns) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (3_400_000, "3.4 MB"), (5e12, "5000.0 GB")])
def test_size(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_widest_columns_are_cut_first_and_a_row_stays_one_line() -> None:
    rows = [("id-0123456789", "several words " * 9, "several words " * 8, "1.0s")]
    (_, row) = plain(table(("ID", "LONG", "LONG TOO", "AGE"), rows))
    assert row.startswith("id-0123456789  several") and row.endswith("…  1.0s") and row.count("…") == 2 and len(row) == 100


def test_breakdown_has_a_bar_for_each_share() -> None:
    assert plain(breakdown({"route": 250_000, "prefill": 750_000}, 1_000_000)) == [
        "route    250 µs  25.0 %  ███████▌",
        "prefill  750 µs  75.0 %  ██████████████████████▌",
    ]
    assert plain(breakdown({"route": 0}, 0)) == ["route  0 µs  0.0 %"]


@pytest.mark.parametrize(
    ("stream", "env", "shown"),
    [
        (Terminal, {"TERM": "xterm"}, "\x1b[31mx\x1b[0m\n"),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, "x\n"),
        (Terminal, {"TERM": "dumb"}, "x\n"),
        (io.StringIO, {"TERM": "xterm"}, "x\n"),
        (io.StringIO, {"TERM": "xterm", "FORCE_COLOR": "1"}, "x\n"),
    ],
)
def test_colour_only_on_a_terminal_that_wants_it(
    stream: type[io.StringIO], env: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    written = stream()
    show(Text("x", "bad"), stream=written)
    assert written.getvalue() == shown


def test_text_is_shown_as_it_is() -> None:
    text = "[red]markup[/red] :smile: " + "a long line " * 20
    assert plain(text) == [text.rstrip()] and plain(table(("[b]",), [("[red]x",)])) == ["[b]", "[red]x"]


def test_a_terminal_that_is_narrower_gets_narrower_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert console(Terminal()).width == 60 and console(io.StringIO()).width == 100
    monkeypatch.setenv("COLUMNS", "200")
    assert console(Terminal()).width == 100


def test_timings_report_shows_parts_sum_handoff_and_caches() -> None:
    timings = Timings(
        ttft_ns=100_000_000,
        route_ns=10_000_000,
        reserve_ns=5_000_000,
        prefill_compute_ns=80_000_000,
        first_token_return_ns=4_000_000,
        kv_exposed_ns=3_000_000,
        decode_queue_ns=1_000_000,
        tpot_ns=20_000_000,
        total_ns=500_000_000,
        kv_bytes=2_000_000,
        transport="shm",
        mode=PrefillMode.REMOTE,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        prefill_cached_tokens=16,
        num_retries=1,
    )
    text = "\n".join(plain(*timings_report(Completed(Usage(40, 20, 16, 40, 31), timings, num_resumes=1))))
    assert "drafted 40, kept 31" in text
    for expected in (
        "time to first token  100.0 ms",
        "prefill_compute",
        "80.0 %",
        "sum of the parts 99.0 ms; measured as a whole 100.0 ms (1.0 % apart)",
        "added to the first gap  4.0 ms",
        "kv_exposed",
        "20.0 ms per output token (50.0 tokens/s)",
        "2.0 MB of KV over shm, prefill-0 → decode-0",
        "prefill had 16 and decode 0 of the prompt's 40 tokens",
        "survived  1 prefill retries, 1 routers lost",
    ):
        assert expected in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_timings_report_of_a_local_request_with_one_token() -> None:
    timings = Timings(ttft_ns=1_000, prefill_compute_ns=1_000, mode=PrefillMode.LOCAL, decode_worker="decode-0")
    text = "\n".join(plain(*timings_report(Completed(Usage(1, 1, 0), timings))))
    assert "drafted" not in text
    assert "decode-0 prefilled the prompt itself" in text and "first gap" not in text and "one token" in text


def test_status_says_what_fetching_and_restoring_saved() -> None:
    workers = [
        mesh_pb2.WorkerStatus(
            info=worker_pb2.WorkerInfo(worker_id="p0"), fetched_tokens=1200, restored_tokens=340, saved_s=-2.25
        ),
        mesh_pb2.WorkerStatus(info=worker_pb2.WorkerInfo(worker_id="d0")),
    ]
    lines = plain(*status_lines(mesh_pb2.GetStatusResponse(workers=workers)))
    head = next(number for number, line in enumerate(lines) if "FETCHED" in line)
    assert lines[head].split() == ["WORKER", "FETCHED", "RESTORED", "SAVED"]
    assert lines[head + 1].split() == ["p0", "1200", "340", "-2.2s"] and not lines[head + 2].startswith("d0")
    assert not any("FETCHED" in line for line in plain(*status_lines(mesh_pb2.GetStatusResponse(workers=workers[1:]))))


def test_status_says_what_guessing_brings() -> None:
    proposers = [
        worker_pb2.ProposerReport(name="prompt_lookup", verified=[80, 20], kept=[60, 10]),
        worker_pb2.ProposerReport(name="heads"),
    ]
    told = {"tokens_per_row": 1.704, "computed_per_row": 2.1, "drafting_s": 0.26}
    report = worker_pb2.SpeculationReport(**told, proposers=proposers, failed_proposers=["heads"])  # type: ignore[arg-type]
    quiet = worker_pb2.SpeculationReport(tokens_per_row=1.0, computed_per_row=1.0, num_rows=7)
    workers = [
        mesh_pb2.WorkerStatus(info=worker_pb2.WorkerInfo(worker_id="d0"), load=worker_pb2.LoadReport(speculation=report)),
        mesh_pb2.WorkerStatus(info=worker_pb2.WorkerInfo(worker_id="d1")),
        mesh_pb2.WorkerStatus(info=worker_pb2.WorkerInfo(worker_id="p0"), load=worker_pb2.LoadReport(speculation=quiet)),
    ]
    lines = plain(*status_lines(mesh_pb2.GetStatusResponse(workers=workers)))
    at = next(number for number, line in enumerate(lines) if "TOKENS/STEP" in line)
    assert " ".join(lines[at + 1].split()) == "d0 1.70 2.10 100 70 0.3s prompt_lookup 70 % of 100, heads 0 % of 0"
    assert lines[at + 2] == "d0: heads has failed and drafts no more; the worker's log says why"
    assert not any("d1" in line or "p0" in line for line in lines[at:])
    assert not any("TOKENS/STEP" in line for line in plain(*status_lines(mesh_pb2.GetStatusResponse(workers=workers[1:]))))


def test_status_fits_a_hundred_columns() -> None:
    roles = [worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE]
    info = worker_pb2.WorkerInfo(worker_id="worker-of-a-long-name-0", epoch=(1 << 64) - 1, address="127.0.0.1:40123", roles=roles)
    info.engine, info.identity.model = "vllm", "a model of a long name"
    info.lacks.append(worker_pb2.ENGINE_LACK_REPRODUCIBLE)
    load = worker_pb2.LoadReport(num_running=64, num_total_blocks=20000, num_free_blocks=12, num_generated_tokens=123456)
    why = "left out for 60.0 s: 100% of its last requests failed, the last one so: " + 100 * "x"
    breakers = [
        mesh_pb2.BreakerStatus(
            role=worker_pb2.ROLE_PREFILL,
            state=mesh_pb2.BREAKER_STATE_OPEN,
            left_out=True,
            left_ms=60_000,
            num_ejections=1234,
            reason=why,
        ),
        mesh_pb2.BreakerStatus(role=worker_pb2.ROLE_DECODE, state=mesh_pb2.BREAKER_STATE_HALF_OPEN, num_ejections=1),
    ]
    status = mesh_pb2.GetStatusResponse(
        router_id="router-1",
        max_inflight=256,
        workers=[mesh_pb2.WorkerStatus(info=info, load=load, alive=True, breakers=breakers), mesh_pb2.WorkerStatus(info=info)],
        objectives=[mesh_pb2.Objective(model="m", ttft_ms=300, tpot_ms=50, quantile=0.95)],
        num_token_mismatches=1,
        num_redrawn_tokens=7,
        admission=[
            mesh_pb2.AdmissionStatus(priority=common_pb2.PRIORITY_STANDARD, num_inflight=3, num_admitted=123456),
            mesh_pb2.AdmissionStatus(
                tenant="t" * 128,
                priority=common_pb2.PRIORITY_INTERACTIVE,
                refused=[
                    mesh_pb2.RefusalCount(reason=reason, count=count)
                    for reason, count in (("objective", 7), ("queue_full", 12345), ("rate", 100), ("share", 5))
                ],
            ),
        ],
    )
    lines = plain(*status_lines(status))
    text = "\n".join(lines)
    assert all(len(line) <= 100 for line in lines)
    assert "prefill,decode" in text and "19988/20000" in text and "ffffffff" in text and "lost" in text and "95 %" in text
    assert "vllm ≈" in text and "≈: a request that is computed again there may draw other tokens" in text
    assert "7 repeated indexes had another token where" in text and "1 repeated indexes had another token: this is a bug" in text
    assert "(default)" in text and "interactive" in text and "12457: 12345 queue_full, 100 rate" in text
    assert "60.0s" in text and "1234" in text and "left out for 60.0 s: 100% of" in text and "half-open" in text
    assert "BREAKER" not in "\n".join(
        plain(*status_lines(mesh_pb2.GetStatusResponse(workers=[mesh_pb2.WorkerStatus(info=info)])))
    )
    assert "no worker is known" in "\n".join(plain(*status_lines(mesh_pb2.GetStatusResponse())))
    assert role_names([worker_pb2.ROLE_DECODE]) == "decode"


def test_status_says_how_new_requests_are_shared() -> None:
    shares = [
        mesh_pb2.RevisionShare(num_decode_workers=2, weight=3),
        mesh_pb2.RevisionShare(
            revision="green", num_prefill_workers=1, num_decode_workers=1, weight=1, num_ended=9, num_failed=2
        ),
    ]
    split = mesh_pb2.TrafficSplit(model="m", revisions=shares, is_set=True)
    lines = plain(*status_lines(mesh_pb2.GetStatusResponse(splits=[split])))
    assert "m: new requests by weight" in lines
    assert any("none: share 0.75, 0 prefill, 2 decode" in line for line in lines)
    assert any("green: share 0.25, 1 prefill, 1 decode, 0 running, 2 of 9 failed" in line for line in lines)
