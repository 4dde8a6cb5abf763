"""KV in and out of pools that ranks have of their own: real processes, whose memory stands for that of a device each."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.parallel.tp_protocol import RankFailed
from tests.engine.parallel.conftest import config_of, pids_of, running
from tests.engine.parallel.staged_ranks import Staged, prefilled, staged_ranks
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not tried elsewhere yet")
PROMPT = tuple(range(5, 75))


@contextmanager
def staged(folder: Path, timeout_s: float = 30.0) -> Iterator[Staged]:
    """On CPUs, where ranks would share a pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdmesh.engine.parallel.load.ranks_share_pool", lambda config: False)
        with staged_ranks(config_of(folder, 2, tensor_parallel_timeout_s=timeout_s)) as made:
            yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Staged]:
    with staged(tiny) as made:
        yield made
        assert made.staging.num_free == 2


def test_a_piece_holds_the_heads_of_all_ranks_as_one_ranks_pool_would(pair: Staged, tiny: Path) -> None:
    with running(config_of(tiny, 1)) as single:
        theirs = prefilled(single, "r", PROMPT)
        expected = single.kv.tensor[:, :, theirs].clone()
    ours = prefilled(pair.engine, "r", PROMPT)
    found = pair.fetched(ours)
    tokens = slice(0, len(PROMPT) // 16)  # whole blocks
    torch.testing.assert_close(found[:, :, tokens], expected[:, :, tokens], rtol=2e-4, atol=2e-4)
    assert all(found[..., head, :].abs().amax() > 0 for head in range(2))
    pair.engine.release("r")


def test_what_is_stored_lies_in_these_blocks_alone_on_every_rank(pair: Staged) -> None:
    blocks, beside = [100, 97, 110], [96, 98, 99, 101, 109, 111]
    before = pair.fetched(beside)
    piece = pair.taken()
    wanted = pair.numbers(piece, 2, 3).copy_(torch.randn(pair.numbers(piece, 2, 3).shape)).clone()
    pair.staging.store(piece, range(2), blocks, pair.marks.now()).result(20)
    pair.staging.give_back(piece)
    assert torch.equal(pair.fetched(blocks)[:2], wanted)
    assert torch.equal(pair.fetched(beside), before)


def test_a_scatter_outlasts_what_a_rank_was_told_before_and_has_not_done(pair: Staged) -> None:
    """A block that was given away under a copy: the rank hears of the scatter while that still waits in its other socket."""
    [pid] = pids_of(pair.engine)
    for index in range(4):
        os.kill(pid, signal.SIGSTOP)
        try:
            pair.model.copy_blocks([90], [91])
            piece = pair.taken()
            wanted = pair.numbers(piece, 2, 1).fill_(float(index + 1)).clone()
            copy = pair.staging.store(piece, range(2), [91], pair.marks.now())
            time.sleep(0.02)
            assert not copy.done() and piece.is_under_way
        finally:
            os.kill(pid, signal.SIGCONT)
        copy.result(20)
        pair.staging.give_back(piece)
        assert torch.equal(pair.fetched([91])[:2], wanted)


def test_marks_of_a_running_step_let_parts_go_before_its_end(pair: Staged) -> None:
    """Every layer is told of, and its part fetched, on the thread that computes: rank 1 has come as far, or comes."""
    found: list[Tensor] = []
    signal_, layer_done = pair.engine.exports.signal, pair.engine.exports.signal.layer_done

    def noted(index: int) -> None:
        layer_done(index)
        if index == 0:
            piece = pair.taken()
            [ready] = pair.engine.exports.ready()
            pair.staging.fetch(piece, range(1), [ready.block_ids[0]], pair.marks.behind(1)).result(20)
            found.append(pair.numbers(piece, 1, 1).clone())
            pair.staging.give_back(piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal_, "layer_done", noted)
        blocks = prefilled(pair.engine, "early", PROMPT[::-1])
    assert len(found) == 2
    assert torch.equal(found[0], pair.fetched(blocks[:1])[:1])
    pair.engine.release("early")


def _stop(pid: int) -> None:
    """Stop a rank. One that runs on another core goes on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


def test_a_rank_that_is_killed_in_a_copy_fails_the_worker_and_is_named(tiny: Path) -> None:
    with staged(tiny) as made:
        heard: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
        made.engine.watch_ranks(heard.put)
        [pid] = pids_of(made.engine)
        _stop(pid)
        piece = made.taken()
        copy = made.staging.fetch(piece, range(2), [0], made.marks.now())
        time.sleep(0.05)
        assert piece.is_under_way
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match=rf"rank 1 \(process {pid}\) ended with signal 9"):
            copy.result(20)
        assert "ended with signal 9" in str(heard.get(timeout=20)) and heard.empty()
        with pytest.raises(RankFailed, match="ended with signal 9"):
            made.staging.fetch(piece, range(2), [0], made.marks.now()).result(0)
        made.staging.give_back(piece)
        with pytest.raises(RankFailed, match="ended with signal 9"):
            prefilled(made.engine, "r", PROMPT)


def test_a_rank_that_is_silent_in_a_copy_fails_the_worker_though_no_step_runs(tiny: Path) -> None:
    with staged(tiny, timeout_s=0.5) as made:
        heard: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
        made.engine.watch_ranks(heard.put)
        [pid] = pids_of(made.engine)
        _stop(pid)
        piece = made.taken()
        with pytest.raises(RankFailed, match=rf"rank 1 \(process {pid}\) has not answered for 0\.5 s in a copy of KV"):
            made.staging.store(piece, range(2), [0], made.marks.now()).result(20)
        assert "has not answered" in str(heard.get(timeout=20))
        made.staging.give_back(piece)
