"""A start that takes long says so: what the engine reports, and that it goes on while nothing is reported."""

from __future__ import annotations

import asyncio
import re

import pytest

from pdmesh.runtime.process import Lifecycle
from pdmesh.worker.main import _LoadProgress
from tests.support.waiting import eventually


async def test_silence_is_filled_with_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    life = Lifecycle()
    monkeypatch.setattr(life, "progress", said.append)
    progress = _LoadProgress(life, "loading a model")
    telling = asyncio.create_task(progress.keep_saying(0.02))
    await eventually(lambda: len(said) > 1)
    assert said[0] == "loading a model" and re.fullmatch(r"loading a model, \d+ s so far", said[1])
    await asyncio.to_thread(progress.say, 0.0, "compiling")
    await eventually(lambda: bool(re.fullmatch(r"compiling, \d+ s so far", said[-1])))
    assert "compiling" in said
    telling.cancel()
