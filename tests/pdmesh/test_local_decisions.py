"""What `pdmesh up --autoscale` decides is shown by `pdmesh status` on the same machine."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pdmesh.autoscaler.views import Decision, PoolDecision, PoolName
from pdmesh.commands.status import decision_lines
from pdmesh.launcher.local_state import FORGOTTEN_S, DecisionFile, latest
from tests.support.terminal import plain

HERE = "127.0.0.1:4001"
REASON = "9.5 requests/s expected (8.1/s came) need 2 for TPOT 100 ms of 90%; " + "1 serves and 1 starts; " * 4
DECISION = Decision((PoolDecision(PoolName.PREFILL, 1, 1, "enough"), PoolDecision(PoolName.DECODE, 1, 2, REASON)))


def test_the_latest_of_the_same_workers_is_shown_until_nobody_decides_any_more(tmp_path: Path) -> None:
    shown = DecisionFile(lambda: [HERE, "127.0.0.1:4002"], tmp_path)
    assert latest([HERE], tmp_path) is None, "nothing is decided"
    shown.decided(Decision((PoolDecision(PoolName.BOTH, 1, 3, "before"),)), 0.0)
    shown.decided(DECISION, 1.0)
    told = latest([HERE, "127.0.0.1:9"], tmp_path)
    assert told is not None and [pool["name"] for pool in told["pools"]] == ["prefill", "decode"]
    assert told["pools"][1] == {
        "name": "decode", "before": 1, "replicas": 2, "reason": REASON, "held": None, "text": f"decode 1 → 2: {REASON}",
    }  # fmt: skip
    assert latest(["127.0.0.1:4002"], tmp_path) == told, "without a worker the router's address is enough"
    assert latest(["127.0.0.1:4003"], tmp_path) is None, "that is another mesh"
    shown.remove()
    shown.remove()
    assert latest([HERE], tmp_path) is None


def test_of_a_process_that_was_killed_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text("{")
    old = time.time() - 2 * FORGOTTEN_S
    os.utime(tmp_path / "1.json", (old, old))
    other = json.dumps({"members": [HERE], "at_s": time.time() + 60, "pools": [{"name": "both"}]})
    for number, text in enumerate(("none", "[]", '{"members": 1}', other), start=2):
        (tmp_path / f"{number}.json").write_text(text)
    shown = DecisionFile(lambda: [HERE], tmp_path)
    assert not (tmp_path / "1.json").exists()
    shown.decided(DECISION, 0.0)
    told = latest([HERE], tmp_path)
    assert told is not None and decision_lines(told, told["at_s"]), "what cannot be read is in nobody's way"


def test_who_cannot_write_decides_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    DecisionFile(lambda: [HERE], tmp_path / "file").decided(DECISION, 0.0)
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "file"))
    shown = DecisionFile(lambda: [HERE])
    shown.decided(DECISION, 0.0)
    shown.remove()
    assert latest([HERE]) is None


def test_lines_say_how_old_it_is_and_the_whole_reason(tmp_path: Path) -> None:
    DecisionFile(lambda: [HERE], tmp_path).decided(DECISION, 0.0)
    told = latest([HERE], tmp_path)
    assert told is not None
    lines = plain(*decision_lines(told, told["at_s"] + 3.2))
    assert lines[1].startswith("AUTOSCALER") and "3 s ago" in lines[1]
    assert lines[2] == "prefill stays at 1: enough"
    assert " ".join(line.strip() for line in lines[3:]) == f"decode 1 → 2: {REASON}".strip()
    assert all(len(line) <= 100 for line in lines) and len(lines) > 4
    assert decision_lines(None, 0.0) == []
