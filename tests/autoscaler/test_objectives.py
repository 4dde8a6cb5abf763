"""Objectives: which of them pools are sized for, and that they change while the autoscaler runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pdmesh.autoscaler.config import AutoscalerConfig, goals_of, objective_of, promise
from pdmesh.autoscaler.loop import ObjectivesFile
from pdmesh.autoscaler.main import open_loop
from pdmesh.autoscaler.views import Decision
from pdmesh.planning.capacity_load import Goals
from pdmesh.runtime.config import ConfigError
from tests.autoscaler.collected import D, P, worker
from tests.autoscaler.routers import serving, told_router
from tests.autoscaler.scenes import DECODE, PREFILL, need, policy, snapshot

SLACK = '["m"]\nttft_ms = 5000\ntpot_ms = 200\nquantile = 0.95\n'
TIGHT = '["m"]\nttft_ms = 600\ntpot_ms = 60\nquantile = 0.9\n'


def _goals(folder: Path, text: str) -> Goals:
    path = folder / "objectives.toml"
    path.write_text(text)
    return goals_of(objective_of(str(path), ""), 10.0)


@pytest.mark.parametrize(
    ("tables", "ttft_s", "tpot_s"),
    [
        ("", 5.0, 0.2),
        ("[m.interactive]\nttft_ms = 150\ntpot_ms = 20\n", 0.15, 0.02),
        ("[m.interactive]\nttft_ms = 150\n[m.standard]\ntpot_ms = 80\n", 0.15, 0.08),
        ("[m.interactive]\nttft_ms = 150\n[m.standard]\nttft_ms = 9000\n", 0.15, 0.2),
        # Nobody is promised the model's own bounds then.
        ("[m.interactive]\nttft_ms = 7000\n[m.standard]\nttft_ms = 9000\n", 7.0, 0.2),
        ("[m.batch]\nttft_ms = 60000\n", 5.0, 0.2),
        ("[m.batch]\nttft_ms = 100\ntpot_ms = 5\n", 5.0, 0.2),
    ],
)
def test_pools_are_sized_for_the_tightest_bounds_but_those_of_batch(
    tables: str, ttft_s: float, tpot_s: float, tmp_path: Path
) -> None:
    assert _goals(tmp_path, SLACK + tables) == Goals(ttft_s, tpot_s, 0.95, 0.01)


def test_new_goals_change_sizes_and_nothing_that_was_learned() -> None:
    tight = Goals(ttft_s=0.2, tpot_s=0.015, quantile=0.95)
    told, always_tight = policy(), policy(goals=tight)
    prefill, decode = need(60.0)
    for now_s in range(0, 30, 10):
        before, tighter = (each.decide(snapshot(now_s, 60.0, prefill, decode)) for each in (told, always_tight))
    assert (before.replicas(PREFILL), before.replicas(DECODE)) == (prefill, decode)
    assert tighter.replicas(PREFILL) > prefill and tighter.replicas(DECODE) > decode
    learned = told.save()
    told.aim(tight)
    assert told.save() == learned and told.goals == tight
    after = told.decide(snapshot(30, 60.0, prefill, decode))
    assert [after.replicas(name) for name in (PREFILL, DECODE)] == [tighter.replicas(name) for name in (PREFILL, DECODE)]


def test_the_file_is_read_anew_when_it_changes_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "objectives.toml"
    path.write_text(SLACK)
    file = ObjectivesFile(str(path), "", 10.0)
    slack, tight = Goals(5.0, 0.2, 0.95, 0.01), Goals(0.6, 0.06, 0.9, 0.01)
    caplog.set_level(logging.INFO, "pdmesh.autoscaler.loop")

    def said() -> list[str]:
        texts = [f"{record.levelname} {record.message}" for record in caplog.records]
        caplog.clear()
        return texts

    assert (file.model, file.look(), said()) == ("m", slack, [])
    path.write_text(TIGHT)
    assert [file.look(), file.look()] == [tight, tight]
    (line,) = said()
    assert line.startswith(f"INFO objectives were reloaded: {promise(tight)}; before: {promise(slack)}")
    for text in ("ttft_ms = ", '["m"]\nttft_ms = 600\n', SLACK.replace('"m"', "other"), SLACK.replace("0.95", "0.2")):
        path.write_text(text)
        assert [file.look(), file.look()] == [tight, tight]
        (line,) = said()
        assert line.startswith(f"ERROR the changed objectives cannot be used, {promise(tight)} stays: ")
    path.unlink()
    assert file.look() == tight and len(said()) == 1
    path.write_text(SLACK + "[other]\nttft_ms = 1\ntpot_ms = 1\n")
    assert file.look() == slack and len(said()) == 1, "of the same model, though it is not the only one any more"


def test_a_bad_file_is_no_beginning(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--objectives"):
        ObjectivesFile(str(tmp_path / "none.toml"), "", 10.0)


async def test_a_running_autoscaler_decides_by_the_changed_file(tmp_path: Path) -> None:
    path, decisions = tmp_path / "objectives.toml", list[Decision]()
    path.write_text(SLACK)
    async with serving(router := told_router(1, worker("p0", (P,)), worker("d0", (D,)))):
        config = AutoscalerConfig(routers=(router.address,), objectives=str(path))
        loop = open_loop(config, lambda decision, now_s: decisions.append(decision))

        async def reasons() -> str:
            router.more(20)
            await loop.round()
            return decisions[-1].reason if decisions else ""

        await reasons()
        assert "TTFT 5000 ms of 95%" in await reasons()
        path.write_text(TIGHT)
        after = await reasons()
        assert "TTFT 600 ms of 90%" in after and "TPOT 60 ms of 90%" in after
        path.write_text("rubbish")
        assert "TTFT 600 ms of 90%" in await reasons()
        await loop.close()
