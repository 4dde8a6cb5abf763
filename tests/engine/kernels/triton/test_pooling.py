"""Embeddings on the Triton kernels are those of the reference: in chunks, beside decode rows, and with several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.parallel.model import ParallelModel
from pdmesh.engine.request import EngineRequest, Pooling
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.parallel.conftest import running
from tests.engine.parallel.test_parallel_engine import embeddings
from tests.support.mock_engine import open_engine
from tests.support.tiny_families import make_tiny_family
from tests.support.tiny_models import make_tiny_model

PROMPTS = [(1, 2, 3), tuple(range(7, 26)), (9,)]


@pytest.fixture(scope="module", params=["stablelm", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A final norm of either kind, one with a bias."""
    pytest.importorskip("transformers")
    return make_tiny_family(tmp_path_factory.mktemp(request.param), request.param, num_hidden_layers=2)


def config_of(folder: Path, backend: str, **settings: object) -> EngineConfig:
    sizes = {"num_blocks": 24, "max_context": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "num_threads": 1}
    given = {"dtype": "float32", "speculation": "none", "device": DEVICE if backend == "triton" else "cpu", **sizes, **settings}
    return EngineConfig(str(folder), backend=backend, **given)  # type: ignore[arg-type]


def reference(folder: Path) -> dict[str, torch.Tensor]:
    config = config_of(folder, "torch")
    engine = open_engine(config, load_model(config))
    found = embeddings(engine, PROMPTS)
    engine.close()
    return found


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(wanted) == len(Pooling) * len(PROMPTS)
    for name, expected in wanted.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4)


def test_pooled_states_are_the_references(folder: Path) -> None:
    config = config_of(folder, "triton")
    loaded = load_model(config)
    assert isinstance(loaded.model, TritonModel)
    engine = open_engine(config, loaded)
    assert engine.can_pool
    drawing = EngineRequest("drawing", (5, 9, 31), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert engine.add(drawing)
    engine.step()  # from now on it has decode rows beside the prompts
    check(embeddings(engine, PROMPTS), reference(folder))
    engine.check_integrity()
    engine.close()


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="on the CPU ranks share memory as Linux has it")
def test_ranks_pool_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, "llama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with running(config_of(folder, "triton", tensor_parallel=2, tensor_parallel_timeout_s=120.0)) as engine:
        assert isinstance(engine._loaded.model, ParallelModel) and engine.can_pool
        check(embeddings(engine, PROMPTS), reference(folder))
