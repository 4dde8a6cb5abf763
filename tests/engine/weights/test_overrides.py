"""Keys of config.json that the command line overrides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh import overrides
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.memory import effective_max_context
from pdmesh.runtime.config import ConfigError, parse, to_env
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


def test_values_are_json_and_else_text() -> None:
    content = {"a": {"b": 1, "c": 2}, "d": 3}
    given = ["a.b=4.5", "d=null", "e.f.g=true", 'h={"i": [1, 2]}', "j=silu", 'k="5"']
    assert overrides.overridden(content, given) == {
        "a": {"b": 4.5, "c": 2}, "e": {"f": {"g": True}}, "h": {"i": [1, 2]}, "j": "silu", "k": "5",
    }  # fmt: skip
    assert content == {"a": {"b": 1, "c": 2}, "d": 3}


@pytest.mark.parametrize("text", ["", "a", "=1", "a b=1", ".a=1", "a..b=1", "a.=1"])
def test_what_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"override: .* is not KEY=VALUE"):
        overrides.check([text])


def test_a_key_is_given_once_and_nothing_is_put_into_a_number() -> None:
    with pytest.raises(ValueError, match=r"override: a.b is given twice"):
        overrides.check(["a.b=1", "a.b=2"])
    with pytest.raises(ValueError, match=r"override: a.b: a holds no mapping; give a=VALUE"):
        overrides.overridden({"a": 1}, ["a.b=2"])


def test_the_flag_is_repeated_and_travels_to_children() -> None:
    scaling = 'rope_scaling={"rope_type": "yarn", "factor": 4.0}'
    config = parse(EngineConfig, ["--model", "m", "--override", scaling, "--override", "head_dim=16"], {}, prog="worker")
    assert config.override == (scaling, "head_dim=16")
    assert parse(EngineConfig, [], to_env(config), prog="worker") == config
    with pytest.raises(ConfigError, match="--override: 'x' is not KEY=VALUE"):
        parse(EngineConfig, ["--model", "m", "--override", "x"], {}, prog="worker")


@pytest.mark.parametrize(
    "given",
    [
        ('rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}',),
        ('rope_scaling={"type": "yarn", "factor": 4}',),
        ("rope_scaling.rope_type=yarn", "rope_scaling.factor=4"),
        ("rope_parameters.rope_type=yarn", "rope_parameters.factor=4"),
    ],
)
def test_yarn_gives_the_context_that_model_cards_name(folder: Path, given: tuple[str, ...]) -> None:
    source, _ = open_checkpoint(folder, given)
    assert source.config.max_context == 1024
    assert (source.config.rope.rope_type, source.config.rope.factor, source.config.rope.theta) == ("yarn", 4.0, 10000.0)
    asked = EngineConfig(model=str(folder), max_context=1024, override=given)
    assert effective_max_context(asked, source.config) == 1024
    with pytest.raises(ValueError, match=r"max_context: 1024 is more than the model's 256; .*--override rope_scaling="):
        effective_max_context(asked, open_checkpoint(folder)[0].config)


def test_a_model_with_overrides_is_another_to_the_mesh(folder: Path) -> None:
    config = EngineConfig(model=str(folder), num_blocks=32, backend="torch")
    plain, yarn = (
        load_model(config),
        load_model(replace(config, override=("rope_scaling.rope_type=yarn", "rope_scaling.factor=2"))),
    )
    assert plain.config.max_context == 256 and yarn.config.max_context == 512
    assert plain.weights_hash != yarn.weights_hash


def test_a_key_that_no_family_reads_is_taken_away(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_flux_capacitor": True}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"use_flux_capacitor: not read .* --override use_flux_capacitor=null"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, ["use_flux_capacitor=null"])[0].config.num_layers == 2
