"""A family of models is one file and one line of `pdmesh/engine/models/registry.py`: the file that docs/models.md shows is run
here, and serves the tokens that transformers computes from the same weights under another family's names."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.models.reader import UnsupportedModel
from pdmesh.engine.models.registry import FAMILIES
from tests.engine.test_model_transformers import greedy, prompt, reference
from tests.structure.measure import ROOT
from tests.support.engine_requests import request
from tests.support.mock_engine import open_engine, run_to_end
from tests.support.tiny_families import make_tiny_family

pytest.importorskip("transformers")
NAME = "terse"
STORED = {"model.layers.": "model.blocks.", "mlp.up_proj": "mlp.wi", "mlp.down_proj": "mlp.wo"}
PAGE = ROOT / "docs/models.md"


def example() -> types.ModuleType:
    """Return the page's file as a module."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    module = types.ModuleType(NAME)
    exec(compile(code, str(PAGE), "exec"), module.__dict__)  # noqa: S102
    return module


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line of the registry."""
    monkeypatch.setitem(FAMILIES, NAME, example().FAMILY)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A checkpoint that transformers computes: an Arcee is a Terse by another name."""
    return make_tiny_family(tmp_path / "arcee", "arcee", rms_norm_eps=1e-6)


@pytest.fixture
def terse(tmp_path: Path, original: Path) -> Path:
    folder = tmp_path / NAME
    folder.mkdir()
    content = json.loads((original / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**content, "model_type": NAME}), encoding="utf-8")
    tensors = load_file(original / "model.safetensors")
    save_file({stored(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def stored(name: str) -> str:
    for ours, theirs in STORED.items():
        name = name.replace(ours, theirs)
    return name


def settings(folder: Path) -> EngineConfig:
    return EngineConfig(str(folder), num_blocks=64, max_context=512, num_threads=1, backend="torch", dtype="float32")


def test_a_family_that_is_not_registered_is_refused_and_the_known_ones_are_named(terse: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"model_type '{NAME}' is not supported; this engine runs apertus, arcee, "):
        load_model(settings(terse))


@pytest.mark.usefixtures("registered")
def test_it_serves_the_tokens_of_transformers(terse: Path, original: Path) -> None:
    loaded = load_model(settings(terse))
    assert loaded.config.parts == ("plain MLP", "relu2 activation")
    engine, token_ids = open_engine(settings(terse), loaded), prompt(40)
    assert engine.add(request("r", tuple(token_ids), max_tokens=24))
    tokens = run_to_end(engine).answer("r").token_ids
    assert list(tokens) == greedy(reference(original, dtype=torch.float32), token_ids, 24)
    assert len(set(tokens)) > 4


@pytest.mark.usefixtures("registered")
def test_a_key_that_the_new_family_does_not_read_is_refused(terse: Path) -> None:
    path = terse / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "expert_count": 8}), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="expert_count: not read for model_type 'terse'"):
        load_model(settings(terse))
