"""What the loop says of what it did: once, and again only rarely."""

from __future__ import annotations

from pathlib import Path

from pdmesh.autoscaler.loop_history import Entry, Held, History, append_to, read_entries


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    history = History(append_to(tmp_path / "decisions.jsonl"))
    history.changed(1.0, "scale", "decode 1 → 2: more", {"decode": 2})
    history.held(2.0, Held("stale", "figures are 7 s old"), {})
    history.held(3.0, Held("stale", "figures are 9 s old"), {})
    history.held(4.0, None, {})
    kinds = ["scale", "hold", "resume"]
    assert [entry.kind for entry in history.entries] == kinds
    assert read_entries(tmp_path / "decisions.jsonl") == list(history.entries)
    assert read_entries(tmp_path / "decisions.jsonl")[0] == Entry(1.0, "scale", "decode 1 → 2: more", {"decode": 2})


def test_a_hold_is_said_when_it_begins_and_ends_however_it_is_worded() -> None:
    history = History()
    for now_s, what, text in (
        (0.0, "failed starts", "4 need 2, 1/s of it to drain the backlog"),
        (2.0, "failed starts", "4 need 2"),
        (30.0, "failed starts", "5 need 3, 2/s of it to drain the backlog"),
        (62.0, "failed starts", "5 need 3"),
        (64.0, "failed starts", "5 need 3, 2/s of it to drain the backlog"),
        (130.0, "failed starts", "6 need 3"),
        (140.0, "stale", "figures are 9 s old"),
        (150.0, "", ""),
        (152.0, "", ""),
    ):
        history.held(now_s, Held(what, text) if what else None, {})
    said = [(entry.at_s, entry.kind) for entry in history.entries]
    assert said == [(0.0, "hold"), (62.0, "hold"), (140.0, "hold"), (150.0, "resume")]


def test_a_failure_is_said_once_and_rarely_again() -> None:
    history = History()
    for now_s in range(0, 200, 2):
        history.failed(now_s, f"no quota; the next try is {now_s} s away" if now_s < 40 or now_s % 4 else None)
    assert [entry.at_s for entry in history.entries] == [0.0, 62.0, 122.0, 182.0]
