"""Exchanges: sums and what bounds them. Of NCCL only what is settled before it is asked: no machine of the tests has it."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pdmesh.engine.parallel.collectives import NCCL_SETTINGS, Group, leave_errors_to_us, open_meeting_point, wait_until
from pdmesh.engine.parallel.split import Shard
from pdmesh.engine.parallel.tp_protocol import ExchangeFailed


def test_torch_is_told_to_leave_errors_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment said: a step whose exchange was broken off by torch would end like any other."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    leave_errors_to_us()
    assert {name: os.environ[name] for name in NCCL_SETTINGS} == NCCL_SETTINGS
    assert NCCL_SETTINGS["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_what_is_done_in_time_and_what_is_not() -> None:
    done = threading.Event()
    started = time.monotonic()
    assert not wait_until(done.is_set, 0.05)
    assert 0.05 <= time.monotonic() - started < 5
    threading.Timer(0.05, done.set).start()
    assert wait_until(done.is_set, 30)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_without_nccl_no_group_on_devices() -> None:
    with pytest.raises(ExchangeFailed, match="this torch has no NCCL"):
        Group(open_meeting_point(1), Shard(0, 1), "cuda", 1.0)


def test_on_the_cpu_the_environment_stays_and_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    group = Group(open_meeting_point(1), Shard(0, 1), "cpu", 5.0)
    assert torch.equal(group.gather(torch.ones(2, 3)), torch.ones(2, 3))
    group.wait()
    assert not NCCL_SETTINGS.keys() & os.environ.keys()
