"""Ranks on the Triton kernels give what one rank gives: logits, the pool, and greedy tokens, handed off as well."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pdmesh.engine.kernels.triton.model as model_module
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.kv_cache.pool import KVShape
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.parallel import tp_protocol
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.parallel.share import Share
from pdmesh.engine.parallel.split import Shard
from pdmesh.engine.parallel.tp_protocol import Kind
from pdmesh.engine.parallel.tp_worker import _Follower
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.sampling_params import SamplingParams
from tests.engine.parallel.conftest import running
from tests.engine.parallel.staged_ranks import handed_off, staged_ranks
from tests.engine.parallel.test_parallel_engine import batches, numbers
from tests.support.handed_over import hand_over
from tests.support.mock_engine import run_to_end
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="on the CPU ranks share memory as Linux has it"
)
PROMPTS = [(1, 2, 3), tuple(range(7, 40)), (*range(7, 27), 9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four KV heads, biases behind the sums, and a vocabulary that two do not divide."""
    more: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "vocab_size": 321, "tie_word_embeddings": True}
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", **sizes, **more)


@pytest.fixture(autouse=True)
def interpreter_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(part for part in folders if part))


def config_of(folder: Path, tensor_parallel: int, **settings: object) -> EngineConfig:
    sizes = {"num_blocks": 24, "max_context": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_threads": 1}
    given = {"dtype": "float32", "speculation": "none", "tensor_parallel_timeout_s": 120.0, **sizes, **settings}
    return EngineConfig(str(folder), backend="triton", tensor_parallel=tensor_parallel, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("degree", "quantization"), [(2, "none"), (2, "int8"), (2, "int4"), (2, "fp8"), (4, "none")])
def test_logits_and_the_pool_are_those_of_one_rank(folder: Path, degree: int, quantization: str) -> None:
    """A chunk of a prompt, another beside a decode row, then decode rows alone (a bucket, twice)."""
    settings = {"quantization": quantization, "quantization_group": 32}
    single, several = (load_model(config_of(folder, each, **settings)) for each in (1, degree))
    parallel, model = several.model, single.config
    assert isinstance(parallel, ParallelModel)
    assert (several.numeric_mode, parallel.backend) == (single.numeric_mode, "triton")
    spare = 0.01 if quantization == "none" else 0.5  # words come in whole tiles, of which small shares leave more empty
    assert parallel.bytes_per_step == pytest.approx(single.model.bytes_per_step, rel=spare)  # type: ignore[union-attr]
    signal = LayerReadiness(model.num_layers)  # of steps that hand off: what others compute must not depend on it
    shape = KVShape(model.num_layers, 8, 16, model.num_kv_heads, model.head_dim, torch.float32)
    pool, alone = parallel.open_pool(shape), torch.zeros(shape.tensor_shape)
    try:
        chunk, mixed, *_ = batches()
        rest = [mixed, decode_rows(21), decode_rows(22)] if quantization == "none" else [decode_rows(20)]
        for batch in [chunk, *rest]:
            expected = single.model.forward(batch, alone).clone()
            torch.testing.assert_close(parallel.forward(batch, pool.tensor, signal), expected, rtol=2e-4, atol=2e-4)
        assert signal.num_done == model.num_layers
        torch.testing.assert_close(pool.tensor, alone, rtol=2e-4, atol=2e-4)
    finally:
        parallel.close()
        pool.close()


def test_a_follower_prepares_no_draws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower hears of it through its socket; what it never launches is not compiled there."""
    prepared = list[str]()
    monkeypatch.setattr(model_module, "warm", lambda *_: prepared.append("steps"))
    monkeypatch.setattr(DeviceSampler, "prepare", lambda *_: prepared.append("draws"))
    model = load_model(config_of(folder, 1)).model
    assert isinstance(model, TritonModel)
    model = TritonModel(model.decoder, recorder=model.recorder)
    share, kv = Share(model, None), torch.zeros(2, 2, 4, 16, 4, 16)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        tp_protocol.send(mine, Kind.PREPARE)
        mine.close()
        with pytest.raises(EOFError):
            _Follower(theirs, share, kv, Shard(1, 2)).compute()
    assert prepared == ["steps"]
    share.prepare_draws()  # as rank 0 does
    assert prepared == ["steps", "draws"]


def decode_rows(position: int) -> StepBatch:
    """Of the sequence in blocks 3 and 4, and of the one in block 1, eleven behind it."""
    tokens, positions, slots = numbers([5, 6]), numbers([position, position - 11]), numbers([48 + position, 5 + position])
    return StepBatch(tokens, positions, slots, [0, 1, 2], [position + 1, position - 10], [[3, 4], [1]], numbers([0, 1]))


def answers(engine: Engine) -> list[tuple[int, ...]]:
    for index, prompt in enumerate(PROMPTS):
        assert engine.add(EngineRequest(str(index), prompt, GREEDY))
    collector = run_to_end(engine)
    return [collector.answer(str(index)).token_ids for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def one(folder: Path) -> list[tuple[int, ...]]:
    with running(config_of(folder, 1)) as engine:
        return answers(engine)


@pytest.fixture
def pair(folder: Path) -> Iterator[Engine]:
    with running(config_of(folder, 2)) as engine:
        yield engine


def test_greedy_tokens_are_those_of_one_rank(pair: Engine, one: list[tuple[int, ...]]) -> None:
    """All at once: chunks, decode rows beside them, and buckets of decode rows, which every rank records at the same step."""
    assert answers(pair) == one


@pytest.mark.parametrize("way", ["to two", "to one"])
def test_handed_off_between_degrees(folder: Path, pair: Engine, one: list[tuple[int, ...]], way: str) -> None:
    with running(config_of(folder, 1)) as single:
        source, target = (single, pair) if way == "to two" else (pair, single)
        for index, expected in enumerate(one):
            request = EngineRequest(str(index), PROMPTS[index], GREEDY)
            assert source.add(replace(request, prefill_only=True))
            [first] = run_to_end(source).answer(str(index)).token_ids
            hand_over(source, target, request, {0: first})
            assert (first, *run_to_end(target).answer(str(index)).token_ids) == expected, f"prompt {index}"


def test_handed_off_where_each_rank_has_a_pool(folder: Path, one: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: kernels see a pool of the rank's heads, and one of them moves blocks to and from pieces. It hands off
    to itself, by way of other blocks."""
    monkeypatch.setattr("pdmesh.engine.parallel.load.ranks_share_pool", lambda config: False)
    with staged_ranks(config_of(folder, 2, prefix_caching=False)) as pair:
        assert handed_off(pair, pair, EngineRequest("r", PROMPTS[1], GREEDY)) == one[1]
