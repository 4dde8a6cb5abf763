"""The command: prints what came, says what is wrong in one line, and shapes the load as asked."""

import json
from pathlib import Path

import pytest

from pdmesh.runtime.config import ConfigError, parse
from pdmesh.simulator.config import SimulatorConfig
from pdmesh.simulator.main import EXIT_USAGE, main
from pdmesh.simulator.workers.spec import SpecError, read_spec, spec_of

SPEC = {
    "fixed_s": 4e-3, "per_prefill_token_s": 5e-5, "per_prefill_context_s": 2e-9, "per_sequence_s": 1e-4,
    "per_context_token_s": 1e-8, "max_num_batched_tokens": 2048, "max_num_seqs": 256, "num_blocks": 30000,
}  # fmt: skip
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{number:02d}.0000000,{100 + number},20\n" for number in range(50)
)


@pytest.fixture
def speed(tmp_path: Path) -> str:
    path = tmp_path / "speed.json"
    path.write_text(json.dumps(SPEC), encoding="utf-8")
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return f"azure-conv={path}"


def test_generated(speed: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speed", speed, "--rate", "20/s", "--requests", "200", "--both", "2", "--ttft-ms", "500", "--tpot-ms", "50"]
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_requests"] == found["num_completed"] + found["num_refused"] == 200
    assert sum(window["num_arrived"] for window in found["windows"]) == 200
    assert found["pod_seconds"]["both"] == pytest.approx(2 * found["simulated_s"], rel=0.01)
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "200 requests in" in said
    assert "TTFT" in said


def test_a_trace_at_another_rate(speed: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speed", speed, "--trace", trace, "--decode", "1", "--prefill", "1", "--json"]
    took_s = []
    for rate in ("1x", "5x", "10/s"):
        assert main([*flags, "--rate", rate]) == 0
        took_s.append(json.loads(capsys.readouterr().out)["simulated_s"])
    assert took_s == [pytest.approx(49, abs=1), pytest.approx(49 / 5, abs=1), pytest.approx(4.9, abs=1)]
    assert main([*flags, "--requests", "120"]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 120


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--decode", "1", "--rate", "fast"], "--rate: 'fast' is neither as 2x nor as 50/s"),
        (["--decode", "1"], "--rate: generated arrivals need a rate"),
        (["--decode", "1", "--rate", "5/s"], "--requests: generated arrivals have no end"),
        (["--prefill", "1"], "--decode: there must be a worker that decodes"),
        (["--decode", "1", "--trace", "azure"], "--trace: 'azure' is not KIND=PATH"),
        (["--decode", "1", "--rate", "5/s", "--requests", "1", "--swing", "2@60"], "--swing: the depth 2 is not below 1"),
        (["--decode", "1", "--rate", "5/s", "--requests", "1", "--swing", "0.5@0"], "--swing: the period 0 is not more than 0"),
        (["--decode", "1", "--rate", "5/s", "--requests", "0"], "--requests: give 1 or more"),
        (["--decode", "1", "--trace", "azure-conv=x", "--requests", "0"], "--requests: give 1 or more"),
        (
            ["--decode", "1", "--rate", "5/s", "--requests", "1", "--burst", "-1@3"],
            "--burst: expected one argument; write --burst=",
        ),
        (["--decode", "1", "--rate", "5/s", "--requests", "1", "--burst=-1@3"], "--burst: '-1@3' is not FACTOR@START"),
        (["--decode", "1", "--rate", "5/s", "--requests", "1", "--burst", "2"], "--burst: '2' is not FACTOR@START"),
        (["--decode", "1", "--rate", "5/s", "--requests", "1", "--ttft-ms", "5"], "--ttft-ms: give both objectives"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        parse(SimulatorConfig, ["--speed", "x.json", *flags], {}, prog="simulator")


def test_files_that_are_not_there(speed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--speed", str(tmp_path / "no.json"), "--decode", "1", "--rate", "1/s", "--requests", "1"]) == EXIT_USAGE
    assert main(["--speed", speed, "--decode", "1", "--trace", f"mooncake={tmp_path / 'no'}"]) == EXIT_USAGE
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "no.json" in said[0]
    assert "no such file" in said[1]


def test_the_load_swings_and_bursts(speed: str) -> None:
    flags = ["--speed", speed, "--decode", "1", "--rate", "10/s", "--requests", "3000", "--scatter", "0"]
    shaped = parse(SimulatorConfig, [*flags, "--swing", "0.5@200", "--burst", "3@100"], {}, prog="simulator")
    plain = parse(SimulatorConfig, flags, {}, prog="simulator")
    times = [arrival.at_s for arrival in shaped.arrivals(4096)]
    assert times == sorted(times)
    assert times[-1] < [arrival.at_s for arrival in plain.arrivals(4096)][-1]
    assert sum(100 <= at_s < 160 for at_s in times) > 2 * sum(160 <= at_s < 220 for at_s in times) * 0.9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fixed_s": "fast"}, "fixed_s: 'fast' is not a number of seconds"),
        ({"fixed_s": -1}, "fixed_s: must be seconds"),
        ({"num_blocks": 1.5}, "num_blocks: 1.5 is not a whole number"),
        ({"blocks": 5}, "blocks: unknown field"),
        ({"max_num_seqs": 2048}, "max_num_seqs: must be below max_num_batched_tokens"),
        ({"noise": "much"}, "noise: 'much' is not a number"),
        ({"between_s": -0.001}, "between_s: must not be negative"),
        ({"noise_lasts_s": 0}, "noise_lasts_s: must be seconds, more than 0"),
        ({"prefix_tokens": 100}, "prefix_tokens: must be a multiple of block_size"),
    ],
)
def test_what_is_no_worker(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec_of({**SPEC, **change})


def test_a_worker_from_a_file(speed: str, tmp_path: Path) -> None:
    spec = read_spec(speed)
    assert spec.speed.per_prefill_token_s == 5e-5
    assert spec.largest == 32768
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SpecError, match=r"list\.json: holds no table"):
        read_spec(str(tmp_path / "list.json"))
