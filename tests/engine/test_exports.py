"""What another thread is told of a prefill_only request's KV while its step runs is true, and is told in time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.events import SIGNALS_PER_STEP, LayerReadiness
from pdmesh.engine.loop import EngineLoop
from pdmesh.engine.outputs import KVReady, StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.backends import BACKENDS
from tests.support.engine_requests import assert_whole, request
from tests.support.mock_engine import Collector, hash_block, make_engine
from tests.support.tiny_models import make_tiny_model

LAYERS, BLOCK = 12, 16
PROMPT = tuple(5 + (7 * i) % 200 for i in range(700))


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    folder = make_tiny_model(tmp_path, num_hidden_layers=LAYERS)
    sizes = {"num_blocks": 120, "max_num_batched_tokens": 256, "num_threads": 1}
    config = EngineConfig(str(folder), backend=request.param, speculation="none", **sizes)  # type: ignore[arg-type]
    return Engine(config, hash_block=hash_block)


def prefill(request_id: str, prompt: tuple[int, ...] = PROMPT) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=4), prefill_only=True)


def full_blocks(ready: KVReady, num_tokens: int) -> list[int]:
    return list(ready.block_ids[: num_tokens // BLOCK])


def test_what_is_said_to_be_final_is(engine: Engine) -> None:
    """Another thread copies what it is told of, as soon as it is told; nothing of that changes afterwards."""
    kv, copies, stop = engine.kv.tensor, dict[tuple[int, int], torch.Tensor](), threading.Event()

    def read() -> None:
        seen: set[KVReady] = set()
        while not stop.is_set():
            for ready in engine.exports.ready():
                if ready in seen or not ready.num_layers:
                    continue
                seen.add(ready)
                ids = full_blocks(ready, ready.num_step_tokens)
                copies[ready.num_step_tokens, ready.num_layers] = kv[: ready.num_layers][:, :, ids].clone()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert engine.add(prefill("p"))
        results = [engine.step() for _ in range(3)]
    finally:
        stop.set()
        reader.join()
    assert all(results)
    block_ids = engine.held_blocks("p")
    for (num_tokens, num_layers), copy in copies.items():
        assert torch.equal(copy, kv[:num_layers][:, :, list(block_ids[: num_tokens // BLOCK])]), (num_tokens, num_layers)
    assert len(copies) > 3
    assert any(num_layers < LAYERS for _, num_layers in copies)
    engine.release("p")
    assert_whole(engine)
    engine.kv.close()


async def test_the_event_loop_hears_of_layers_during_a_step(engine: Engine) -> None:
    during: list[KVReady] = []
    ended: list[StepResult] = []
    done = asyncio.Event()

    def on_step(result: StepResult) -> None:
        ended.append(result)
        if result.started:
            done.set()

    loop = EngineLoop(engine, on_step, on_ready=during.extend)
    loop.start(asyncio.get_running_loop())
    assert await loop.call(lambda each: each.add(prefill("p")))
    await asyncio.wait_for(done.wait(), 20)
    block_ids = await loop.call(lambda each: each.held_blocks("p"))
    await loop.call(lambda each: each.release("p"))
    await loop.stop()
    assert [result.ready for result in ended] == [(KVReady("p", block_ids, n, n, LAYERS),) for n in (256, 512, 700)]
    assert {(ready.request_id, ready.block_ids) for ready in during} == {("p", block_ids)}
    assert any(0 < ready.num_layers < LAYERS for ready in during)
    engine.kv.close()


def test_a_cached_prefix_is_final_from_the_start() -> None:
    engine = make_engine(num_blocks=16, block_size=4)
    first = request("a", prefill_only=True)
    collector = Collector()
    for name in ("a", "b"):
        assert engine.add(EngineRequest(name, first.prompt, first.sampling, prefill_only=True))
        result = engine.step()
        assert result is not None
        collector.take(result)
        ready = result.ready
    assert ready[0].num_tokens == 10
    assert engine.held_blocks("a")[:2] == engine.held_blocks("b")[:2]
    for name in ("a", "b"):
        engine.release(name)
    assert_whole(engine)


def test_others_are_not_exported_and_signal_nothing() -> None:
    engine = make_engine()
    engine.add(request("r"))
    result = engine.step()
    assert result is not None
    assert result.ready == ()
    assert engine.exports.ready() == ()


def test_who_is_read_is_not_preempted() -> None:
    """A prefill that somebody reads arrived last, and keeps its blocks all the same."""
    engine = make_engine(num_blocks=9, block_size=4, max_num_batched_tokens=12)
    decoding = [request(f"d{i}", prompt=(5 + i, 6, 7, 8), max_tokens=12) for i in range(2)]
    for each in decoding:
        engine.add(each)
    engine.step()
    engine.add(request("p", prompt=tuple(range(4, 20)), prefill_only=True))
    collector = Collector()
    blocks: set[tuple[int, ...]] = set()
    while (result := engine.step()) is not None:
        collector.take(result)
        blocks |= {tuple(ready.block_ids) for ready in result.ready}
    assert len(blocks) == 1
    assert engine.stats().num_preemptions > 0
    assert engine.held_blocks("p") in blocks
    engine.release("p")
    while engine.step() is not None:
        pass
    assert_whole(engine)


def test_signals_are_few_and_the_last_layer_is_one() -> None:
    signal = LayerReadiness(30)
    assert -(-30 // signal.every) == SIGNALS_PER_STEP
    signal.notify_every(0)
    assert signal.every == 1
    for index in range(30):
        signal.layer_done(index)
        assert signal.num_done == index + 1
    signal.reset()
    assert signal.num_done == 0
