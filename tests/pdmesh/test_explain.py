"""`pdmesh explain` against a router with stub workers, and what it refuses."""

import asyncio
import json
from pathlib import Path

import pytest

from pdmesh.cli import EXIT_USAGE, run
from pdmesh.commands.explain import decision_lines
from pdmesh.commands.status import status_lines
from pdmesh.v1 import mesh_pb2
from tests.router.mesh import request, running_mesh, write_model
from tests.support.terminal import plain


async def test_a_request_and_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_mesh(write_model(tmp_path), policy="predict") as mesh:
        asked = request()
        asked.options.request_id = "mine"
        await mesh.generate(asked)
        address = f"--router=127.0.0.1:{mesh.router.server.port}"
        assert await asyncio.to_thread(run, ["explain", "mine", address]) == 0
        shown = capsys.readouterr().out
        assert await asyncio.to_thread(run, ["explain", "--prompt", "a long secret " * 20, "--json", address]) == 0
        dry = json.loads(capsys.readouterr().out)
        assert await asyncio.to_thread(run, ["explain", address]) == 0
        latest = capsys.readouterr().out
        assert await asyncio.to_thread(run, ["explain", "other", address]) == EXIT_USAGE
        assert "other" in capsys.readouterr().err
        assert await asyncio.to_thread(run, ["status", address]) == 0
        assert "prediction error, median of 1 requests" in capsys.readouterr().out
    assert "request mine · 50 tokens" in shown and "LOCAL on d0" in shown and "observed: TTFT" in shown
    assert "engine pdmesh (reproducible): d0 and 1 more" in shown
    assert "d0 ←" in shown and "(local)" in shown and "p0" in shown
    (decision,) = dry["decisions"]
    assert [c["chosen"] for c in decision["candidates"]] == [True, False] and "secret" not in str(dry)
    assert latest.splitlines()[1:] == shown.splitlines()[1:]


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["mine", "--latest=2"], "--latest"),
        (["--latest=101"], "--latest"),
        (["--prompt=x", "--max-tokens=0"], "--max-tokens"),
        (["--prompt=x", "--slo-ttft-ms=-1"], "--slo-ttft-ms"),
    ],
)
def test_wrong_flags(flags: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["explain", *flags])
    assert field in capsys.readouterr().err


def test_lines_of_one_that_predicts_nothing() -> None:
    candidate = mesh_pb2.Candidate(decode_worker_id="d0", prefill_worker_id="p0", chosen=True, engine="other", may_redraw=True)
    lines = plain(*decision_lines(mesh_pb2.Decision(request_id="r", reason="because", candidates=[candidate])))
    assert lines[1] == "because" and "d0 ←" in lines[3] and "ms" not in lines[3]
    assert lines[4] == "engine other (a repeat may draw other tokens): d0 and 1 more"


def test_status_without_predictions_says_nothing_of_them() -> None:
    assert not any("prediction" in line for line in plain(*status_lines(mesh_pb2.GetStatusResponse(router_id="r"))))


def test_ways_and_what_came_are_shown() -> None:
    candidates = [
        mesh_pb2.Candidate(decode_worker_id="d0", prefill_worker_id="p0", chosen=True, ttft_ms=40, compute_ms=210, fetch_ms=40),
        mesh_pb2.Candidate(decode_worker_id="d0", ttft_ms=90, compute_ms=210, restore_ms=90),
        mesh_pb2.Candidate(decode_worker_id="d1", ttft_ms=210, compute_ms=210),
    ]
    decision = mesh_pb2.Decision(request_id="r", reason="because", candidates=candidates, num_tokens=900)
    *_, head, fetched, restored = plain(*decision_lines(decision))
    assert head.split() == ["DECODE", "PREFILL", "TTFT", "IF", "COMPUTED", "IF", "FETCHED", "IF", "RESTORED", "TAKEN"]
    assert fetched.split() == ["d0", "←", "p0", "210", "ms", "40.0", "ms", "fetch"]
    assert restored.split() == ["d0", "(local)", "210", "ms", "90.0", "ms", "restore"]
    decision.observed_ttft_ms, decision.cached_tokens, decision.fetched_tokens, decision.fetch_ms = 42.0, 800, 640, 21.5
    decision.restore_ms = 3.0  # and nothing came
    assert plain(*decision_lines(decision))[-1] == "of 900 tokens 800 were cached: 640 fetched in 21.5 ms, 0 restored in 3.0 ms"
