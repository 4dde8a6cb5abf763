"""A worker knows how long its steps take, and says how busy it is while it steps."""

from __future__ import annotations

import sys
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.engine import hardware
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.hardware import MachineLimits, cost_of, measure_limits
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.outputs import StepResult, StepWork
from pdmesh.planning.latency_message import latency_message, reported_latency
from pdmesh.planning.latency_model import LatencyModel, Work
from pdmesh.v1 import worker_pb2
from pdmesh.worker.engines.builtin import BuiltinEngine, prior_for
from pdmesh.worker.load import LoadReporter, StepWatch
from pdmesh.worker.roles import RoleGate, roles_of
from tests.support.mini_router import MiniRouter
from tests.support.tiny_families import make_tiny_family
from tests.support.waiting import eventually
from tests.support.worker_mesh import LOCAL, Model, Peer, token_request

PROMPT = [10 + (7 * i) % 200 for i in range(60)]
PRIOR = LatencyModel(1e-3, 1e-5, 1e-8, 1e-4, 1e-7)


def result(step: int, seconds: float) -> StepResult:
    return StepResult(step, 10**9, 10**9 + round(seconds * 1e9), 4, StepWork(0, 0, 4, 400), (), ())


def reporter(engine: Engine, now_ns: list[int]) -> LoadReporter:
    watch = StepWatch(clock=lambda: now_ns[0] / 1e9)
    watch.start_from(PRIOR)
    gate = RoleGate(roles_of(("decode",)))
    return LoadReporter(
        BuiltinEngine(engine),
        gate,
        replace(engine.stats(), taken_ns=0),
        watch,
        worker_id="w",
        epoch=1,
        max_num_seqs=16,
        num_handoff_failures=lambda: 0,
        clock_ns=lambda: now_ns[0],
    )


def test_a_watch_says_nothing_then_the_prior_then_what_it_saw() -> None:
    now_s = [0.0]
    watch = StepWatch(clock=lambda: now_s[0])
    watch.on_step(result(1, 0.5))
    assert watch.model is None
    watch.start_from(PRIOR)
    assert watch.model == PRIOR
    for step in range(100):
        watch.on_step(result(step, 0.02))
        now_s[0] += 0.02
        model = watch.model
    assert model is not None
    assert model.num_steps >= 90
    assert model.step_s(Work(0, 0, 4, 400)) == pytest.approx(0.02, rel=0.03)


def test_every_number_of_the_model_travels() -> None:
    model = LatencyModel(1.0, 2.0, 3.0, 4.0, 5.0, 6, 7.0, 8.0)
    message = latency_message(model)
    assert tuple(getattr(message, field.name) for field in worker_pb2.LatencyModel.DESCRIPTOR.fields) == astuple(model)
    assert reported_latency(worker_pb2.LoadReport(latency_model=message)) == model
    assert reported_latency(worker_pb2.LoadReport()) is None


def test_a_report_is_as_old_as_it_says(model: Model) -> None:
    engine, now_ns = model.engine(), [250_000_001]
    load = reporter(engine, now_ns)
    assert load.report().age_ms == 251
    stats = replace(engine.stats(), taken_ns=200_000_001, num_decoding=3, decode_context=77, num_prefilling=2)
    load.on_step(replace(result(1, 0.01), stats=stats))
    report = load.report()
    assert (report.age_ms, report.num_decoding, report.decode_context, report.num_prefilling) == (50, 3, 77, 2)
    load.on_step(replace(result(2, 0.01), stats=replace(stats, taken_ns=100, num_decoding=9)))
    load.on_step(result(3, 0.01))
    now_ns[0] += 1_000_000
    assert (load.report().age_ms, load.report().num_decoding) == (51, 3)
    engine.kv.close()


def test_the_prior_is_of_this_model_on_this_machine(model: Model) -> None:
    engine = model.engine()
    cost = engine.cost
    assert cost == cost_of(model.loaded, engine.kv.shape)
    shape = model.loaded.config
    layer = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    layer += 3 * shape.hidden_size * shape.intermediate_size
    assert (cost.backend, cost.numbers, cost.num_weights) == ("torch", "float32", shape.num_layers * layer)
    assert cost.weight_bytes == 4 * (cost.num_weights + shape.vocab_size * shape.hidden_size)
    assert cost.kv_bytes_per_token == shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 4
    measured = measure_limits("torch", "float32", "cpu", 1)
    assert measured is measure_limits("torch", "float32", "cpu", 1)
    assert 1e8 < measured.operations_per_s < 1e14
    assert 1e8 < measured.bytes_per_s < 1e13
    assert all(0 < number < 1 for number in astuple(prior_for(engine))[:5])
    engine.kv.close()


def test_the_cost_of_experts(tmp_path: Path) -> None:
    """A step reads a Mixtral's shared maps and head; of the experts those that tokens chose, 3 · 64 · 96 in four layers."""
    folder = make_tiny_family(tmp_path, "mixtral")
    settings = EngineConfig(str(folder), num_blocks=16, backend="torch", dtype="float32")
    engine = Model(folder, load_model(settings)).engine()
    cost, expert = engine.cost, 4 * 3 * 64 * 96
    shared = 4 * (64 * 16 * 2 * (4 + 2) + 64 * 6)
    assert (cost.num_experts, cost.top_k, cost.expert_bytes) == (6, 2, 4 * expert)
    assert cost.num_weights == shared + 2 * expert
    assert cost.weight_bytes == 4 * (shared + 320 * 64)
    assert prior_for(engine).fixed_s > 0
    engine.kv.close()


@pytest.mark.skipif(sys.platform != "linux", reason="not tried elsewhere yet")
def test_the_prior_is_of_all_ranks(model: Model) -> None:
    """Ranks on the CPU have the machine that one has, and meet twice a layer; those on CUDA have a device each."""
    settings: dict[str, Any] = {"backend": "torch", "tensor_parallel": 2, "num_threads": 1}
    alone = model.engine(num_threads=1)
    num_threads = torch.get_num_threads()
    loaded = load_model(model.engine_config(**settings))
    pair = Model(model.folder, loaded).engine(**settings)
    try:
        assert pair.cost == alone.cost
        of_one, of_both = prior_for(alone), prior_for(pair)
        num_layers = alone.cost.num_layers
        assert of_both.per_prefill_token_s == pytest.approx(of_one.per_prefill_token_s, rel=0.9)
        assert of_both.fixed_s > 2 * num_layers * 2e-4
        assert torch.get_num_threads() == 1
        share = replace(pair.kv.shape, num_kv_heads=pair.kv.shape.num_kv_heads // 2)  # as a rank's pool on a device is
        assert cost_of(loaded, share) == alone.cost
    finally:
        pair.close()
        alone.kv.close()
        torch.set_num_threads(num_threads)


def test_devices_of_several_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def measured(_dtype: torch.dtype, _device: str) -> MachineLimits:
        seen.append(torch.get_num_threads())
        return MachineLimits(3.0, 5.0)

    monkeypatch.setattr(hardware, "_torch_limits", measured)
    measure = measure_limits.__wrapped__
    assert measure("torch", "bfloat16", "cuda", 1, 4) == MachineLimits(12.0, 20.0)
    before = torch.get_num_threads()
    assert measure("torch", "bfloat16", "cpu", 3, 4) == MachineLimits(3.0, 5.0)
    assert seen[1] == 3 and torch.get_num_threads() == before, "all of the worker's threads, for this while"


async def test_a_worker_reports_before_and_while_it_works(decoder: Peer, router: MiniRouter) -> None:
    load = decoder.worker.load
    before = load.report()
    assert decoder.info.max_num_batched_tokens == 64
    assert before.latency_model.num_steps == 0
    assert before.latency_model.fixed_s > 0
    for name in ("r1", "r2"):
        await router.submit(decoder, name, token_request(PROMPT, max_tokens=400), mode=LOCAL)
    await eventually(lambda: load.report().num_decoding == 2)
    report = load.report()
    assert report.num_prefilling == 0
    assert 120 < report.decode_context <= 2 * 460
    await eventually(lambda: load.report().latency_model.num_steps > 50)
    learned = load.report().latency_model
    assert learned.prefill_error > 0
    assert learned.decode_error > 0
    await router.until_finished("r1")
    await router.until_finished("r2")
    await eventually(lambda: load.report().num_running == 0)
    assert (load.report().num_decoding, load.report().decode_context) == (0, 0)
