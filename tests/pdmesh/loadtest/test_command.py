"""`pdmesh loadtest` as a person calls it, against a server in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh import cli
from pdmesh.loadtest import result
from tests.pdmesh.loadtest.test_compare import measured

FAST = {"ttft_s": 0.02, "sigma": 0.1, "gap_s": 0.002}
RUN = ["--rate", "30", "--duration-s", "0.5", "--output-tokens", "3", "--input-tokens", "8", "--no-progress"]
# A busy machine may be late: that is another test's business.
RUN += ["--max-lateness-ms", "60000", "--seed", "3"]  # with this seed both priorities occur


@contextmanager
def stub(kind: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.support.loadtest_stub", kind, "--latencies", json.dumps(FAST)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_run_its_files_and_its_exit_code(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--output", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    with stub(kind) as target:
        kept = cli.run(["loadtest", target, *RUN, *files, "--ttft-ms", "60000", "--priorities", "interactive:1,batch:2"])
        text = capsys.readouterr().out
        missed = cli.run(["loadtest", "run", target, *RUN, "--ttft-ms", "0.001", "--json"])
        document = json.loads(capsys.readouterr().out)
    assert (kept, missed) == (0, 1)
    assert "attained: kept" in text and "interactive" in text and "TTFT from sent" in text
    assert document["summary"]["outcomes"]["ok"] == document["summary"]["num_requests"] > 0
    assert document["summary"]["attained"] is False
    assert "<svg" in (tmp_path / "a.html").read_text()
    assert cli.run(["loadtest", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--fail-if-worse"]) == 0
    assert "TTFT p50" in capsys.readouterr().out
    assert cli.run(["loadtest", "report", str(tmp_path / "a.json"), "--html", str(tmp_path / "b.html")]) == 0
    assert capsys.readouterr().out == text
    assert (tmp_path / "b.html").read_text() == (tmp_path / "a.html").read_text()


def test_a_search_for_the_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    search = ["--find-capacity", "--max-rate", "60", "--windows", "1", "--attainments", "0.9", "--ttft-ms", "60000"]
    with stub("grpc") as target:
        code = cli.run(["loadtest", target, *RUN, *search, "--progress"])
        shown = capsys.readouterr()
        nothing = cli.run(["loadtest", target, *RUN, *search, "--ttft-ms", "0.001"])
    text = shown.out
    assert "30.000 requests/s: 100.00 % attained" in shown.err and " ok · 0 failed · TTFT p50" in shown.err
    assert code == 0 and "up to ≥ 60 requests/s (no rate that was allowed was too high)" in text
    assert nothing == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_search_that_is_interrupted_reports_what_it_found(number: signal.Signals, tmp_path: Path) -> None:
    search = ["--find-capacity", "--windows", "1", "--attainments", "0.9", "--ttft-ms", "60000", "--tpot-ms", "60000"]
    output = tmp_path / "found.json"
    with stub("grpc") as target:
        run = [arg for arg in RUN if arg != "--no-progress"]
        command = [sys.executable, "-m", "pdmesh", "loadtest", target, *run, *search, "--json", "--output", str(output)]
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a job in a shell's background ignores it, and so do its children
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            signal.signal(signal.SIGINT, before)
            assert process.stderr is not None and process.stdout is not None
            while "attained, goodput" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(number)
            shown, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    capacity = json.loads(shown)["capacity"]
    assert capacity["stopped"] == "interrupted" and capacity["capacities"][0]["rate"] >= 30
    assert json.loads(output.read_text())["capacity"] == capacity


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rate", "0"], "--rate"),
        (["--input-tokens", "zipf:3"], "--input-tokens"),
        (["--arrivals", "ramp"], "--ramp-to"),
        (["--priorities", "urgent"], "--priorities"),
        (["--tenants", "a:-1"], "--tenants"),
        (["--tenants", "a:1,a:3"], "--tenants"),
        (["--cancel-share", "2"], "--cancel-share"),
        (["--quantile", "0"], "--quantile"),
        (["--find-capacity", "--trace", "x"], "--find-capacity"),
        (["--output", "/no/such/folder/a.json"], "--output"),
        (["--html", "/"], "--html"),
        (["http://127.0.0.1:1/v1", "--turns", "2"], "--prompt"),
    ],
)
def test_wrong_options_are_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.run(["loadtest", *flags])
    assert caught.value.code == 2 and named in capsys.readouterr().err


def test_files_that_are_wrong_are_named_before_any_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mix.toml").write_text('[chat]\npriority = "urgent"\n')
    (tmp_path / "good.toml").write_text(
        '[chat]\nshare = 2\ninput_tokens = "uniform:1:9"\nttft_ms = 1\n[batch]\npriority = "batch"\n'
    )
    (tmp_path / "goals.json").write_text('{"stub": {"ttft_ms": 60000, "tpot_ms": 60000}}')
    with stub("grpc") as target:
        assert cli.run(["loadtest", target, *RUN, "--mix", str(tmp_path / "mix.toml")]) == 2
        assert "chat.priority" in capsys.readouterr().err
        assert cli.run(["loadtest", target, *RUN, "--trace", str(tmp_path / "none")]) == 2
        assert "none" in capsys.readouterr().err
        assert cli.run(["loadtest", target, *RUN, "--objectives", str(tmp_path / "goals.json")]) == 0
        goals = ["--mix", str(tmp_path / "good.toml"), "--ttft-ms", "60000", "--seed", "1"]  # both kinds among a few
        assert cli.run(["loadtest", target, *RUN, *goals]) == 1
        text = capsys.readouterr().out
    assert "batch" in text and "chat: TTFT <= 1 ms" in text


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://127.0.0.1:1/v1"])
def test_nobody_there(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["loadtest", target, *RUN]) == 3
    assert target in capsys.readouterr().err


def test_a_run_without_an_answer_fails_without_objectives_too(capsys: pytest.CaptureFixture[str]) -> None:
    with stub("grpc") as target:
        assert cli.run(["loadtest", target, *RUN, "--timeout-s", "0.001"]) == 1
    assert "timeout" in capsys.readouterr().out


def test_compare_says_its_doubts_and_fails_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (str(tmp_path / name) for name in ("a.json", "b.json"))
    result.write(measured(1, num=50), a)
    result.write(replace(measured(2, num=50), model="other", interrupted=True, reasons=["it was late"]), b)
    assert cli.run(["loadtest", "compare", a, b, "--json", "--fail-if-worse"]) == 5
    doubts = json.loads(capsys.readouterr().out)["doubts"]
    assert any("model" in doubt for doubt in doubts) and any("interrupted" in doubt for doubt in doubts)
    assert any("it was late" in doubt for doubt in doubts)
    assert cli.run(["loadtest", "compare", a, b]) == 0


def test_compare_needs_two_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["loadtest", "compare", "a.json"])
    assert cli.run(["loadtest", "compare", "nowhere.json", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err


def test_more_than_two_results_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"{name}.json") for name in ("a b", "c", "d")]
    for seed, file in enumerate(files):
        result.write(measured(seed, num=50), file)
    page = tmp_path / "all.html"
    assert cli.run(["loadtest", "compare", *files, files[0], "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert [line.split("  ")[0] for line in shown.splitlines()[1:]] == ["a b", "c", "d", "a b (4)"]
    assert "a b (4)" in page.read_text()
    assert cli.run(["loadtest", "compare", *files, "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["a b", "c", "d"]
    assert cli.run(["loadtest", "compare", *files[:2], "--html", str(page)]) == 0 and "TTFT p50" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.run(["loadtest", "compare", *files, "--fail-if-worse"])


def test_the_command_needs_no_more_than_the_client() -> None:
    program = "import sys, pdmesh.commands.loadtest, pdmesh.commands.loadtest_compare\n"
    program += "print([m for m in ('torch', 'numpy', 'redis', 'tokenizers', 'engine', 'h11') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"
