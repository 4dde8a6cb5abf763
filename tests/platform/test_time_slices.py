"""Threads of a service have a short time slice, those of an engine the system's; without the capability nothing changes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.loop import EngineLoop
from pdmesh.platform import capabilities, linux, time_slices
from pdmesh.platform.capabilities import TIME_SLICES

needs_slices = pytest.mark.skipif(not TIME_SLICES.is_there, reason="this system has no time slices of threads")


def in_thread(work: Callable[[], object]) -> list[float]:
    """The slices in force behind each step of `work`, in a thread of its own: those of this process's threads stay."""
    found: list[float] = []

    def run() -> None:
        found.append(linux.time_slice())
        work()
        found.append(linux.time_slice())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


@needs_slices
def test_what_answers_has_a_short_slice_and_what_it_starts_too() -> None:
    inherited: list[float] = []
    before: list[float] = []

    def answer() -> None:
        with time_slices.computing():  # this process's threads may have short ones already, of a service that ran in it
            before.append(linux.time_slice())
        time_slices.answer_soon()
        inherited.extend(in_thread(lambda: None))

    _, behind = in_thread(answer)
    assert behind == pytest.approx(time_slices.SHORT_S) and behind < before[0]
    assert inherited == [behind, behind]


@needs_slices
def test_what_computes_has_the_systems_slice_and_the_same_priority() -> None:
    def turn() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        time_slices.answer_soon()
        with time_slices.computing():
            assert linux.time_slice() > time_slices.SHORT_S
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 3

    assert in_thread(turn)[1] == pytest.approx(time_slices.SHORT_S)


@needs_slices
def test_an_engine_thread_computes_though_a_service_starts_it() -> None:
    slices: list[float] = []

    def service() -> None:
        time_slices.answer_soon()
        asyncio.run(call_engine(slices))

    assert in_thread(service)[1] == pytest.approx(time_slices.SHORT_S)
    assert slices and all(each > time_slices.SHORT_S for each in slices)


async def call_engine(slices: list[float]) -> None:
    engine: Any = SimpleNamespace(step=lambda: None)
    loop = EngineLoop(engine, on_step=lambda result: None)
    loop.start(asyncio.get_running_loop())
    slices.append(await loop.call(lambda _engine: linux.time_slice()))
    await loop.stop()


def test_without_the_capability_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capabilities.VARIABLE, "time_slices")
    called: list[float] = []
    monkeypatch.setattr(linux, "set_time_slice", called.append)
    time_slices.answer_soon()
    with time_slices.computing():
        pass
    assert not called
