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


AGENTS = ["--turns", "3", "--system-tokens", "40", "--system-prompts", "2", "--tool-share", "0.5", "--tool-tokens", "90"]


def test_agents_and_the_reports_of_their_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--output", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    with stub("grpc") as target:
        assert cli.run(["loadtest", target, *RUN, *AGENTS, *files, "--finish-sessions", "--max-sessions", "6"]) == 0
    text = capsys.readouterr().out
    assert "6 sessions: 6 complete" in text and "reusable: " in text and "none reported as cached" in text
    assert [line.split()[:2] for line in text.splitlines() if line[:1] in ("1", "2", "3")][-3:] == [[n, "6"] for n in "123"]
    page = (tmp_path / "a.html").read_text()
    assert "TTFT by turn" in page and "6 sessions: 6 complete" in page
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["sessions"]["num_complete"] == 6 and [turn["num_requests"] for turn in document["turns"]] == [6] * 3
    assert 0 < document["summary"]["reusable_tokens"] < document["summary"]["prompt_tokens"]
    assert cli.run(["loadtest", "report", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out == text
    assert cli.run(["loadtest", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert "TTFT of later turns p50" in capsys.readouterr().out


def test_sessions_of_a_trace_at_a_tenth_of_its_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(0, 1100, [0, 1, 2]), (10, 600, [0, 3]), (400, 1700, [0, 1, 4, 5]), (500, 9000, [9])]
    lines = [{"timestamp": at, "input_length": length, "output_length": 30, "hash_ids": ids} for at, length, ids in rows]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--trace", str(trace), "--trace-sessions", "--trace-scale", "10", "--trace-requests", "3", "--duration-s", "1"]
    with stub("grpc") as target:
        assert cli.run(["loadtest", target, *RUN, *flags, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50,9,9\n")
        assert cli.run(["loadtest", target, *RUN, *flags]) == 2
        assert "hash_ids" in capsys.readouterr().err
    summary = document["summary"]
    assert (summary["num_requests"], summary["prompt_tokens"]) == (3, 110 + 60 + 170)
    # The first block: 51 tokens; both of the turn before: 102.
    assert summary["reusable_tokens"] == 51 + 102
    assert document["sessions"]["num_complete"] == 2 and document["by_turns"]["later"]["num_requests"] == 1


NEW_FIELDS = {"": ("by_turns", "turns", "sessions"), "sample": ("depth",), "summary": ("prompt_tokens", "reusable_tokens")}


def test_results_of_before_there_were_sessions_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    result.write(measured(1, num=50), new)
    document = json.loads(Path(new).read_text())
    for part, names in NEW_FIELDS.items():
        for name in names:
            del (document[part] if part else document)[name]
    for groups in (document["by_class"], document["by_tenant"]):
        for summary in groups.values():
            del summary["prompt_tokens"], summary["reusable_tokens"]
    Path(old).write_text(json.dumps(document))
    assert cli.run(["loadtest", "report", old, "--html", str(tmp_path / "old.html")]) == 0
    assert "sessions" not in capsys.readouterr().out
    for pair in ((old, new), (new, old), (old, old)):
        assert cli.run(["loadtest", "compare", *pair, "--html", str(tmp_path / "both.html")]) == 0


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
        (["http://127.0.0.1:1/v1", "--endpoint", "chat", "--return-token-ids"], "--return-token-ids"),
        (["--return-token-ids"], "--return-token-ids"),
        (["--trace-sessions"], "--trace-sessions"),
        (["--trace-requests", "5"], "--trace-requests"),
        (["--trace", "x", "--trace-requests", "0"], "--trace-requests"),
        (["--trace", "x", "--trace-scale", "0.5"], "--trace-scale"),
        (["--trace", "x", "--trace-share", "0.5"], "--trace-share"),
        (["--trace", "x", "--trace-sessions", "--trace-share", "0"], "--trace-share"),
        (["--trace", "x", "--trace-scale", "600"], "--trace-scale"),
        (["--trace", "x", "--system-tokens", "9"], "--trace"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--find-capacity", "--finish-sessions"], "--find-capacity"),
        (["--system-tokens", "many"], "--system-tokens"),
        (["--system-tokens", "9", "--prefix-tokens", "9"], "--system-tokens"),
        (["--system-prompts", "0"], "--system-prompts"),
        (["--turns", "2", "--tool-share", "2"], "--tool-share"),
        (["--tool-share", "0.5"], "--tool-share"),
        (["--tool-tokens", "uniform:9"], "--tool-tokens"),
        (["--tool-think-s", "-1"], "--tool-think-s"),
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
