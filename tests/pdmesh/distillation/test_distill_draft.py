"""A draft learns what its teacher generates: layers that are picked, batches, and the whole command on a tiny model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from pdmesh.commands.distill_draft import Options, run
from pdmesh.distillation.outputs import Output
from pdmesh.distillation.student import make_student, picked_layers
from pdmesh.distillation.trainer import Course, Trainer, batches, follow
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.loader.loader import load_model
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from pdmesh.text.block_hash import hash_block
from tests.support.mock_engine import run_to_end
from tests.support.tiny_models import make_tiny_model

pytest.importorskip("transformers")


@pytest.mark.parametrize(("layers", "count", "picked"), [(30, 4, [0, 10, 19, 29]), (4, 2, [0, 3]), (4, 1, [0]), (3, 2, [0, 2])])
def test_layers_are_spread_evenly(layers: int, count: int, picked: list[int]) -> None:
    assert picked_layers(layers, count) == picked


@pytest.mark.parametrize("count", [0, 4])
def test_a_draft_is_smaller_than_its_model(count: int) -> None:
    with pytest.raises(ValueError, match="give 1 to 3"):
        picked_layers(4, count)


def test_a_student_begins_with_the_teachers_layers(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    folder = make_tiny_model(
        tmp_path, "qwen3", num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=16
    )
    import transformers

    teacher = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    student = make_student(folder, 2)
    assert student.config.layer_types == ["full_attention", "sliding_attention"]
    own = student.state_dict()
    assert torch.equal(own["model.layers.1.mlp.up_proj.weight"], teacher["model.layers.3.mlp.up_proj.weight"])
    assert torch.equal(own["model.embed_tokens.weight"], teacher["model.embed_tokens.weight"])


def outputs_of(count: int) -> list[Output]:
    """Return outputs that count upwards from their prompt's last token."""
    return [Output((5, start), tuple((start + step) % 200 for step in range(1, 9)), True) for start in range(count)]


def test_batches_hold_every_output_once_in_a_pass_and_learn_no_prompt() -> None:
    outputs = outputs_of(10)
    some = list(itertools.islice(batches(outputs, Course(batch_tokens=30)), 4))  # three outputs of ten tokens each
    assert sorted(int(row[1]) for token_ids, _ in some for row in token_ids) == list(range(10))
    assert all((labels[:, :2] == -100).all() and (labels[:, 2:] != -100).all() for _, labels in some)


def test_a_student_learns(tmp_path: Path) -> None:
    student = make_student(make_tiny_model(tmp_path, "llama", num_hidden_layers=4), 2)
    outputs = outputs_of(40)
    before = follow(student, outputs)
    trainer = Trainer(student, outputs, Course(batch_tokens=200, rate=3e-3))
    losses = [trainer.step(step / 150) for step in range(150)]
    after = follow(student, outputs)
    assert losses[-1] < 0.3 * losses[0]
    assert after.share > 0.9 > before.share
    assert after.tokens_per_draft > 3


def test_the_command_leaves_a_folder_that_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=4)
    out = tmp_path / "draft"
    options = Options(model=str(folder), out=str(out), layers=1, minutes=5, threads=1, small=True)
    assert run(options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["after"]["share_followed"] > report["before"]["share_followed"]
    tokens = [_greedy(folder, draft) for draft in ("", str(out))]
    assert tokens[0] == tokens[1]
    assert run(options) == 1
    assert "holds a model already" in capsys.readouterr().err


def _greedy(folder: Path, draft: str) -> list[int]:
    config = EngineConfig(
        str(folder), num_blocks=32, max_num_seqs=2, max_context=128, dtype="float32", draft_model=draft,
        speculation="draft_model" if draft else "none",
    )  # fmt: skip
    engine = Engine(config, hash_block=hash_block, loaded=load_model(config))
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    assert engine.add(EngineRequest("a", (1, 2, 3, 4), sampling))
    return list(run_to_end(engine).answer("a").token_ids)


@pytest.mark.parametrize(("field", "value"), [("out", ""), ("layers", 0), ("minutes", 0.0)])
def test_what_is_wrong_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        Options(**{"out": "x", field: value}).validate()  # type: ignore[arg-type]


def test_an_unwritable_folder_is_said_before_anything_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (tmp_path / "file").write_text("")
    assert run(Options(model=str(folder), out=str(tmp_path / "file"), minutes=30)) == 1
    assert "cannot be written to" in capsys.readouterr().err
