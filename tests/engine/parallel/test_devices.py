"""Ranks with a GPU each, over NCCL: graphs with exchanges in them, and ranks that die or fall silent. Needs two GPUs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.parallel.tp_protocol import RankFailed
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.parallel.conftest import pids_of, running
from tests.engine.parallel.staged_ranks import handed_off, prefilled, staged_ranks
from tests.support.mock_engine import run_to_end

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def config_of(folder: Path, backend: str, tensor_parallel: int) -> EngineConfig:
    return EngineConfig(
        str(folder),
        backend=backend,
        device="cuda",
        dtype="float32",
        num_blocks=128,
        max_num_batched_tokens=64,
        speculation="none",
        tensor_parallel=tensor_parallel,
        tensor_parallel_timeout_s=5.0,
    )


def answers(engine: Engine) -> list[tuple[int, ...]]:
    """Of five sequences, which decode in two buckets as some end before the others begin."""
    for index in range(5):
        assert engine.add(EngineRequest(str(index), tuple(range(index, 9 * index + 3)), GREEDY))
    collector = run_to_end(engine)
    return [collector.answer(str(index)).token_ids for index in range(5)]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_two_ranks_give_the_tokens_of_one(folder: Path, backend: str) -> None:
    with running(config_of(folder, backend, 1)) as single, running(config_of(folder, backend, 2)) as pair:
        assert answers(pair) == answers(single)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_falls_silent_ends_the_step(folder: Path, number: signal.Signals) -> None:
    """By an error and in time: nothing ends this process, and no token of the broken step gets out."""
    with running(config_of(folder, "triton", 2)) as engine:
        assert engine.add(EngineRequest("r", tuple(range(40)), SamplingParams(max_tokens=500, ignore_eos=True)))
        for _ in range(3):
            assert engine.step() is not None
        os.kill(pids_of(engine)[0], number)
        started = time.monotonic()
        with pytest.raises(RankFailed, match=r"ended with signal 9|did not take part in a step"):
            while True:
                engine.step()
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_prefilled_by_two_ranks_and_decoded_by_two_others(folder: Path, backend: str) -> None:
    """Rows of each rank's heads to pinned pieces that both map, and from there; marks of both devices, on two GPUs."""
    prompt = tuple(range(7, 90))
    with running(config_of(folder, backend, 1)) as single:
        assert single.add(EngineRequest("r", prompt, GREEDY))
        expected = run_to_end(single).answer("r").token_ids
        kv = single.kv.tensor[:, :, prefilled(single, "kv", prompt[:80])[:5]].cpu()
    with staged_ranks(config_of(folder, backend, 2)) as source, staged_ranks(config_of(folder, backend, 2)) as target:
        computed = prefilled(source.engine, "kv", prompt[:80])
        torch.testing.assert_close(source.fetched(computed[:5]).cpu(), kv, rtol=2e-3, atol=2e-3)
        assert handed_off(source, target, EngineRequest("r", prompt, GREEDY)) == expected


def test_a_rank_that_is_killed_in_a_copy_fails_the_worker(folder: Path) -> None:
    with staged_ranks(config_of(folder, "triton", 2)) as made:
        [pid] = pids_of(made.engine)
        os.kill(pid, signal.SIGSTOP)
        piece = made.taken()
        copy = made.staging.fetch(piece, range(1), [0], made.marks.now())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match="ended with signal 9"):
            copy.result(20)
        made.staging.give_back(piece)
