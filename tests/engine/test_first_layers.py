"""What speculation asks of a model beside its logits: the last hidden states, and a model of its first layers. Both backends."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.models.layers import rms_norm
from tests.engine.backends import BACKENDS, needs_native
from tests.engine.paged_loop import Chunk, PagedLoop, load, make_batch
from tests.support.tiny_models import make_tiny_model

NUM_LAYERS = 4
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}
PROMPT = [(7 * i) % 256 for i in range(150)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("whole"), "qwen2", num_hidden_layers=NUM_LAYERS, **SLIDING)


@pytest.fixture(params=BACKENDS)
def loop(request: pytest.FixtureRequest, folder: Path) -> PagedLoop:
    return loop_of(folder, request.param)


def loop_of(folder: Path, backend: str, **settings: object) -> PagedLoop:
    asked = {"backend": backend, "num_threads": 1, "dtype": "float32", **settings}
    try:
        return PagedLoop(load(folder, **asked))
    finally:
        torch.set_num_threads(1)


def step(loop: PagedLoop, chunk: Chunk, rows: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of all of the chunk's tokens, or of `rows` of them."""
    batch = make_batch([chunk], loop.block_size)
    if rows is not None:
        batch = replace(batch, logits_rows=torch.tensor(rows, dtype=torch.int64))
    hidden = torch.full((len(batch.logits_rows), loop.loaded.config.hidden_size), torch.nan)
    return loop.loaded.model.forward(batch, loop.pool.tensor, None, hidden), hidden


def test_the_head_makes_the_logits_from_the_hidden_states(loop: PagedLoop, folder: Path) -> None:
    logits, hidden = step(loop, Chunk(loop.table(150), PROMPT, 0, every_row=True))
    source, _ = open_checkpoint(folder)
    normed = rms_norm(hidden, source.get("model.norm.weight").float(), loop.loaded.config.norm_eps)
    torch.testing.assert_close(normed @ source.get("lm_head.weight").float().T, logits, atol=1e-4, rtol=1e-5)
    assert torch.equal(logits, loop.logits(PROMPT)), "asking for them changes logits"


@pytest.mark.parametrize("rows", [[0], [149], [3, 4, 80], list(range(150)), []])
def test_hidden_states_of_the_rows_that_are_wanted(loop: PagedLoop, rows: list[int]) -> None:
    _, every = step(loop, Chunk(loop.table(150), PROMPT, 0, every_row=True))
    _, some = step(loop, Chunk(loop.table(150), PROMPT, 0), rows)
    assert torch.equal(some, every[rows])


def test_hidden_states_do_not_depend_on_company(loop: PagedLoop) -> None:
    table = loop.table(150)
    _, whole = step(loop, Chunk(loop.table(150), PROMPT, 0, every_row=True))
    parts = [step(loop, Chunk(table, PROMPT[start : start + 7], start, every_row=True))[1] for start in range(0, 150, 7)]
    assert torch.equal(torch.cat(parts), whole)


@needs_native
def test_a_hidden_tensor_of_another_form_is_refused(folder: Path) -> None:
    loop = loop_of(folder, "native")
    batch, size = make_batch([Chunk(loop.table(3), [1, 2, 3], 0)], 16), loop.loaded.config.hidden_size
    for wrong in (torch.empty(2, size), torch.empty(1, size, dtype=torch.bfloat16), torch.empty(size, 2).T[:1]):
        with pytest.raises(ValueError, match="hidden: "):
            loop.loaded.model.forward(batch, loop.pool.tensor, None, wrong)


def cut(folder: Path, target: Path, num_layers: int) -> Path:
    """The checkpoint with a config of fewer layers: the loader then leaves the others."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    config.pop("layer_types", None)
    (target / "config.json").write_text(json.dumps({**config, **SLIDING}))
    return target


@pytest.mark.parametrize("num_layers", range(1, NUM_LAYERS))
def test_the_first_layers_are_the_model_cut_there(loop: PagedLoop, folder: Path, num_layers: int, tmp_path: Path) -> None:
    """Its keys and values of a prompt are already in the target's pool."""
    backend = "native" if "native" in loop.loaded.numeric_mode else "torch"
    alone = loop_of(cut(folder, tmp_path / "cut", num_layers), backend)
    table = loop.table(170)
    loop.step([Chunk(table, PROMPT, 0)])
    behind = loop.pool.tensor[num_layers:].clone()
    draft = loop.loaded.model.first_layers(num_layers)
    batch = make_batch([Chunk(table, [9, 8, 7], 150, every_row=True)], loop.block_size)
    logits = draft.forward(batch, loop.pool.tensor)
    assert torch.equal(logits, alone.logits([*PROMPT, 9, 8, 7])[150:])
    assert torch.equal(loop.pool.tensor[num_layers:].view(torch.uint8), behind.view(torch.uint8)), "it wrote to other layers"
    verified = loop.step([Chunk(table, [9, 8, 7], 150, every_row=True)])
    assert torch.equal(verified, loop.logits([*PROMPT, 9, 8, 7])[150:]), "it left something behind"


@pytest.mark.parametrize("num_layers", [-1, 0, NUM_LAYERS, NUM_LAYERS + 1])
def test_a_number_of_layers_that_makes_no_draft_is_refused(loop: PagedLoop, num_layers: int) -> None:
    with pytest.raises(ValueError, match=rf"num_layers: {num_layers} of {NUM_LAYERS} layers; it must be 1 to {NUM_LAYERS - 1}"):
        loop.loaded.model.first_layers(num_layers)


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_first_layers_need_no_threads_and_outlive_the_model(folder: Path) -> None:
    loop = loop_of(folder, "native", num_threads=3)
    table, batch = loop.table(20), make_batch([Chunk(list(range(2)), PROMPT[:20], 0, every_row=True)], 16)
    before = len(os.listdir("/proc/self/task"))
    draft = loop.loaded.model.first_layers(2)
    assert len(os.listdir("/proc/self/task")) == before
    assert draft.weights.layers[1].qkv.packed is loop.loaded.model.weights.layers[1].qkv.packed  # type: ignore[union-attr]
    expected, kv = draft.forward(batch, loop.pool.tensor), loop.pool.tensor
    loop.step([Chunk(table, PROMPT[:20], 0)])
    del loop
    assert torch.equal(draft.forward(batch, kv), expected)
    del draft
    assert len(os.listdir("/proc/self/task")) == before - 2, "the threads stay though nobody computes with them"
