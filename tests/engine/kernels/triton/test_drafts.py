"""Models that draft on the Triton kernels: counted before there is a pool, warmed and recorded before there are requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import pdmesh.engine.engine as engine_module
import pdmesh.engine.kernels.triton.model as model_module
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.step import TritonStep
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.memory import MIB
from pdmesh.engine.request import EngineRequest
from pdmesh.engine.speculation.draft_heads.weights import save_heads
from pdmesh.engine.speculation.draft_models.proposer import ModelDraft
from pdmesh.engine.speculation.setup import load_drafts
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.kernels.triton.recorders import Counted
from tests.engine.speculation.heads.tiny_heads import make_heads
from tests.support.mock_engine import FreeRows, open_engine, run_to_end
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

KINDS = ("draft_model", "self_draft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other sizes, so other kernels."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_tiny_model(tmp_path_factory.mktemp("draft"), "llama", seed=5, num_hidden_layers=1, **sizes)


def config_of(folder: Path, small: Path, kind: str, **settings: object) -> EngineConfig:
    sizes = {"max_context": 64, "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_draft_tokens": 3, "draft_length": 3}
    given = {
        "self_draft_layers": int(kind == "self_draft"),
        **sizes,
        "dtype": "float32",
        "device": DEVICE,
        "num_blocks": 16,
        **settings,
    }
    draft = str(small) if kind == "draft_model" else ""
    return EngineConfig(str(folder), backend="triton", speculation=kind, draft_model=draft, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_to_do_when_requests_come(folder: Path, small: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that a draft launches are those of a warm-up on its pool, and no step records anything."""
    recorder, warmed = Counted(), list[tuple[TritonStep, Tensor, int]]()
    monkeypatch.setattr("pdmesh.engine.loader.triton.make_recorder", lambda _: recorder)
    monkeypatch.setattr("pdmesh.engine.loader.loader.is_prepared_on", lambda _: True)
    monkeypatch.setattr("pdmesh.engine.loader.triton.token_buckets", lambda *_: (8,))
    monkeypatch.setattr(model_module, "warm", lambda *of: warmed.append(of))  # test_warm.py has what it does
    monkeypatch.setattr(engine_module, "measure_curve", lambda *_: FreeRows((1,), (1.0,)))
    config = config_of(folder, small, kind)
    engine = open_engine(config, load_model(config))
    draft = draft_of(engine)
    assert isinstance(draft._model, TritonModel)
    assert [(step is draft._model._step, kv is draft.kv.tensor) for step, kv, _ in warmed[1:]] == [(True, True)]
    assert [rows for *_, rows in warmed] == [8, 8]  # two sequences, each with three tokens guessed behind it
    num_recorded = recorder.num_recorded
    assert engine.add(EngineRequest("r", (5, 9, 31), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)))
    run_to_end(engine)
    assert engine.speculator is not None and engine.speculator.tally.stats().num_drafts > 0
    assert recorder.num_recorded == num_recorded
    engine.close()


def draft_of(engine: Engine) -> ModelDraft:
    assert engine.speculator is not None
    [door] = engine.speculator._proposers
    assert isinstance(door._proposer, ModelDraft)
    return door._proposer


@pytest.mark.parametrize("kind", KINDS)
def test_what_drafts_take_is_left_out_of_the_pool(folder: Path, small: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder, small, kind, num_blocks=0, max_context=2048, max_num_seqs=64, kv_memory_share=0.5)
    loaded = load_model(config)
    drafts, token = load_drafts(config, loaded), 2 * 16 * 4  # bytes of a head's keys and values
    assert drafts.block_bytes == (16 * token if kind == "draft_model" else 0)
    assert drafts.step_bytes > 0
    left = 16 * MIB
    monkeypatch.setattr(engine_module, "free_memory", lambda _: loaded.step_bytes(config) + drafts.step_bytes + left)
    monkeypatch.setattr(engine_module, "measure_curve", lambda *_: FreeRows((1,), (1.0,)))
    engine = open_engine(config, loaded)
    block = 2 * 2 * 16 * token  # of two layers and two heads
    assert engine.kv.shape.num_blocks == left // 2 // (block + drafts.block_bytes)
    assert draft_of(engine).kv.num_bytes == engine.kv.shape.num_blocks * drafts.block_bytes
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["heads", *KINDS])
def test_drafts_change_no_token(folder: Path, small: Path, kind: str, temperature: float, tmp_path: Path) -> None:
    heads = tmp_path / "heads.safetensors"
    save_heads(make_heads(hidden_size=64, vocab_size=VOCAB_SIZE), heads)
    given: dict[str, object] = {"draft_heads": str(heads)} if kind == "heads" else {}
    config = config_of(folder, small, kind, num_blocks=64, **given)
    plain = replace(config, speculation="none", draft_model="", draft_heads="", self_draft_layers=0, draft_length=0)
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
    found = []
    for each in (config, plain):
        engine = open_engine(each, load_model(each))
        assert engine.add(EngineRequest("r", (5, 9, 31), sampling))
        found.append(run_to_end(engine).answer("r").token_ids)
        assert each is plain or (engine.speculator is not None and engine.speculator.tally.stats().num_drafts > 0)
        engine.close()
    assert found[0] == found[1]
