"""What proposers need is asked for before any weights are read: here there are none that could be."""

from __future__ import annotations

import json
import logging
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.speculation.draft_heads.weights import FILE, save_heads
from pdmesh.engine.speculation.registry import PROPOSERS
from pdmesh.engine.speculation.setup import check_speculation
from pdmesh.text.block_hash import hash_block
from tests.engine.speculation.heads.tiny_heads import make_heads
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_weights(make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=3))


def without_weights(folder: Path) -> Path:
    """It can be opened, but not be loaded."""
    [path] = folder.glob("*.safetensors")
    save_file({"model.norm.weight": load_file(path)["model.norm.weight"]}, path)
    return folder


def config_of(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig(str(folder), max_context=512, **settings)  # type: ignore[arg-type]


OFF = {"speculation": "none"}


@pytest.mark.parametrize("name", PROPOSERS)
def test_every_name_has_its_maker(name: str) -> None:
    assert callable(pkgutil.resolve_name(PROPOSERS[name]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**OFF, "draft_model": "/some"},
            "draft_model: /some is given, but speculation is none; give speculation=auto, or leave",
        ),
        ({**OFF, "draft_heads": "/some"}, "draft_heads: /some is given, but speculation is none"),
        ({**OFF, "self_draft_layers": 1}, "self_draft_layers: 1 is given, but speculation is none"),
        ({**OFF, "draft_length": 4}, "draft_length: 4 is given, but speculation is none"),
        ({"speculation": "heads"}, f"draft_heads: no {FILE} is in the model's folder; give the path of one, or train it"),
        ({"speculation": "heads", "draft_heads": "/nowhere"}, "draft_heads: /nowhere is no file; give one that was trained for"),
        ({"speculation": "auto", "draft_heads": "/nowhere"}, "draft_heads: /nowhere is no file"),
        ({"speculation": "draft_model"}, "draft_model: empty; give the folder or .gguf file of a smaller model"),
        ({"speculation": "draft_model", "draft_model": "/nowhere"}, "draft_model: /nowhere does not exist; give a model folder"),
        ({"speculation": "auto", "draft_model": __file__}, f"draft_model: {__file__} is neither a folder nor a .gguf file"),
        ({"speculation": "self_draft"}, "self_draft_layers: 0 is not allowed; give 1 to 2: the model has 3 layers"),
        ({"speculation": "auto", "self_draft_layers": 3}, "self_draft_layers: 3 is not allowed; give 1 to 2"),
    ],
)
def test_what_is_missing_is_said_before_the_weights_are_read(folder: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Engine(config_of(folder, **settings), hash_block=hash_block)
    assert str(raised.value).startswith(message)


def test_else_the_weights_are_read(folder: Path) -> None:
    with pytest.raises(ValueError, match="no tensor"):
        Engine(config_of(folder, speculation="self_draft", self_draft_layers=2), hash_block=hash_block)


def _other_size(draft: Path) -> None:
    change(draft / "config.json", lambda content: content.__setitem__("vocab_size", 400))


def _other_tokens(draft: Path) -> None:
    change(draft / "tokenizer.json", lambda content: content["model"]["vocab"].update(new=5))


def _no_tokens(draft: Path) -> None:
    change(draft / "tokenizer.json", lambda content: content.pop("model"))


def _not_json(draft: Path) -> None:
    (draft / "config.json").write_text("{")


def _no_config(draft: Path) -> None:
    (draft / "config.json").unlink()


def change(path: Path, how: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    how(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_other_size, "it has 400 tokens"),
        (_other_tokens, "give a model with the same tokenizer"),
        (_no_tokens, "lists no tokens"),
        (_not_json, "config.json"),
        (_no_config, "no config.json; give a Hugging Face model folder"),
    ],
)
def test_a_draft_model_that_is_not_for_this_model(folder: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    draft = without_weights(make_tiny_model(tmp_path / "draft", num_hidden_layers=1))
    check_speculation(config_of(folder, speculation="draft_model", draft_model=str(draft)))
    spoil(draft)
    with pytest.raises(ValueError) as raised:
        check_speculation(config_of(folder, speculation="draft_model", draft_model=str(draft)))
    assert str(raised.value).startswith("draft_model: ")
    assert said in str(raised.value)


def test_what_is_there_is_not_complained_of(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_heads(make_heads(), tmp_path / FILE)
    heads = str(tmp_path / FILE)
    check_speculation(config_of(folder))
    check_speculation(config_of(folder, **OFF))
    check_speculation(config_of(folder, speculation="auto", draft_heads=heads, self_draft_layers=2, draft_length=4))
    check_speculation(config_of(folder, speculation="heads,lookahead", draft_heads=heads))
    assert not caplog.records


def test_a_setting_that_nobody_named_uses_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_speculation(config_of(folder, speculation="prompt_lookup", self_draft_layers=1, draft_model="/some"))
    assert [record.args[0] for record in caplog.records if record.args] == ["draft_model", "self_draft_layers"]  # type: ignore[index]
