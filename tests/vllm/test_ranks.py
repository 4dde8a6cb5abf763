"""Ranks in processes of their own: what the engine hears of layers and draws, what they cannot split, and what their end does."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tests.worker.engines.engines import VllmInTwo
from tests.worker.engines.harness import GREEDY, opened, request

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from pdmesh_vllm.link import Link  # noqa: E402  needs vLLM's environment
from pdmesh_vllm.loading import load_core  # noqa: E402
from pdmesh_vllm.ranks.link import Drawing, Hello, LayerDone, Waiting  # noqa: E402
from pdmesh_vllm.ranks.server import RankDraws, RankLayers, check_ranks  # noqa: E402


class Highest:
    """Draw the highest logit of each row, and count how often that is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def draw(self, logits: Any, names: Sequence[str | None]) -> Sequence[int]:
        self.num_asked += 1
        return [int(row.argmax()) for row in logits]


def hello(rank: int, **changed: Any) -> Hello:
    return Hello(rank, ("a", "b"), (9, 2, 32, 64), torch.float32)._replace(**changed)


def test_a_layer_counts_once_all_ranks_have_done_it() -> None:
    link, heard = Link(), list[int]()
    link.layer_done = heard.append
    layers = RankLayers(link, 2)
    step = link.begin_step(None)
    layers.done(0, LayerDone(step, 0))
    layers.done(0, LayerDone(step, 1))
    assert heard == []
    layers.done(1, LayerDone(step, 0))
    assert heard == [0]
    later = link.begin_step(None)
    layers.done(1, LayerDone(step, 1))  # came too late: the step has ended
    assert heard == [0]
    layers.done(1, LayerDone(later, 0))
    layers.done(0, LayerDone(later, 0))
    assert heard == [0, 0]


def test_ranks_get_the_tokens_of_one_draw() -> None:
    link = Link()
    link.draws = highest = Highest()
    draws, got = RankDraws(link, num_others=2), list[object]()
    others = [threading.Thread(target=lambda: got.append(draws.wait(Waiting(0)))) for _ in range(2)]
    for each in others:
        each.start()
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]])
    assert draws.draw(Drawing(("r", "s"), (2, 3)), logits.numpy().tobytes()) == [1, 0]
    for each in others:
        each.join(10)
    assert got == [[1, 0], [1, 0]] and highest.num_asked == 1


def test_a_draw_that_fails_fails_in_every_rank() -> None:
    link = Link()
    link.draws = Highest()
    draws = RankDraws(link, num_others=1)
    error = draws.draw(Drawing(("r",), (1, 0)), b"")
    assert isinstance(error, str) and draws.wait(Waiting(0)) == error


def test_no_rank_waits_for_an_engine_that_was_closed() -> None:
    draws = RankDraws(Link(), num_others=1)
    draws.close()
    assert draws.wait(Waiting(0)) == "the engine was closed"


def test_ranks_that_do_not_fit_are_refused() -> None:
    assert check_ranks([hello(1), hello(0)])[1] == 4
    with pytest.raises(ValueError, match="tensor_parallel: rank 1 has KV tensors"):
        check_ranks([hello(0), hello(1, shape=(8, 2, 32, 64))])
    with pytest.raises(ValueError, match=r"tensor_parallel: ranks \[0, 0\]"):
        check_ranks([hello(0), hello(0)])
    with pytest.raises(ValueError, match="without heads to split"):
        check_ranks([hello(0, shape=(9, 32, 576)), hello(1, shape=(9, 32, 576))])


def test_heads_that_the_ranks_do_not_divide_are_refused_before_any_starts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", head_dim=32, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with pytest.raises(ValueError, match=r"tensor_parallel: 2 .* the model's 3 KV heads; give one of \[1, 3\]"):
        load_core({"model": str(folder), "enforce_eager": True, "skip_tokenizer_init": True, **ranks})


async def test_an_engine_whose_rank_is_killed_says_so_at_once(tmp_path: Path) -> None:
    kind = VllmInTwo(tmp_path)
    pids = [worker.proc.pid for worker in kind.engine.loaded.core.model_executor.workers]
    try:
        with pytest.raises(AssertionError, match="a rank of vLLM has ended"):
            async with opened(kind.engine) as it:
                assert (await it.run(request("before"))).tokens[0]
                os.kill(pids[1], signal.SIGKILL)
                await eventually(lambda: bool(it.failures))
                with pytest.raises(Exception):  # noqa: B017  whichever way vLLM says that it is over
                    await asyncio.wait_for(it.run(request("after", sampling=GREEDY)), 20)
    finally:
        kind.close()
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
