"""The native backend in float32 against the torch backend: every variation of a model that it computes, contexts of several
chunks of keys, windows beside and across them, blocks of every size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.cpu.library import Profile
from pdmesh.engine.kernels.cpu.model import NativeModel
from tests.engine.backends import needs_native
from tests.engine.kernels.cpu.native_models import KV_DTYPES, SHAPES, native, prompt, reference
from tests.engine.paged_loop import Chunk, PagedLoop
from tests.support.tiny_models import make_tiny_model

pytestmark = needs_native
Make = Callable[[str], Path]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_logits_are_those_of_the_torch_backend(name: str, tmp_path: Path) -> None:
    kind, overrides = SHAPES[name]
    folder, token_ids = make_tiny_model(tmp_path, kind, **overrides), prompt(290)
    loop, expected = native(folder, "float32"), reference(folder).logits(token_ids)
    assert isinstance(loop.loaded.model, NativeModel)
    assert expected.std() > 0.1, "logits that hardly vary show nothing"
    assert_close(loop.logits(token_ids), expected)
    assert_close(loop.logits(token_ids, 100), expected)


@pytest.mark.parametrize("name", ["llama-odd-groups", "qwen3", "groups-50"])
def test_decode_steps_are_those_of_the_torch_backend(name: str, tmp_path: Path) -> None:
    """One token at a time and in company, over contexts of one chunk of keys and of several, with threads that share them."""
    kind, overrides = SHAPES[name]
    folder = make_tiny_model(tmp_path, kind, **overrides)
    lengths = [1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 400]
    steps = []
    for loop in (reference(folder), native(folder, "float32", num_threads=2)):
        tables = [loop.table(length + 3) for length in lengths]
        loop.step([Chunk(table, prompt(length, length), 0) for table, length in zip(tables, lengths, strict=True)])
        steps.append(
            [
                loop.step([Chunk(t, [seed + i], n + i) for seed, (t, n) in enumerate(zip(tables, lengths, strict=True))])
                for i in (0, 1, 2)
            ]
        )
    for expected, actual in zip(*steps, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("window", [1, 5, 16, 100, 127, 128, 129, 300, 1000])
def test_windows(window: int, tmp_path: Path) -> None:
    folder, token_ids = make_tiny_model(tmp_path, "mistral", sliding_window=window), prompt(500)
    expected, loop = reference(folder).logits(token_ids), native(folder, "float32", num_threads=2)
    for chunk_size in (500, 60, 7):
        assert_close(loop.logits(token_ids, chunk_size), expected)


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn"])
def test_contexts_beyond_the_models_own(rope_type: str, tmp_path: Path) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    own = 64 if rope_type == "dynamic" else 256
    folder = make_tiny_model(tmp_path, max_position_embeddings=own, rope_parameters=rope)
    token_ids = prompt(250)
    loop = native(folder, "float32", max_context=250)
    assert_close(loop.logits(token_ids), reference(folder, max_context=250).logits(token_ids))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_of_any_size_hold_the_same(kv_dtype: str, tmp_path: Path) -> None:
    folder, token_ids = make_tiny_model(tmp_path, "qwen3", head_dim=32), prompt(300)
    expected = native(folder, "float32", kv_dtype=kv_dtype).logits(token_ids)
    for block_size in (32, 48, 64, 128, 256):
        loop = native(folder, "float32", kv_dtype=kv_dtype, num_blocks=64, block_size=block_size)
        assert torch.equal(loop.logits(token_ids, 33), expected), block_size


def test_a_pool_of_another_kind_is_refused(tmp_path: Path) -> None:
    loaded = native(make_tiny_model(tmp_path), "int8", kv_dtype="bfloat16").loaded
    with pytest.raises(ValueError, match=r"KV pool: torch\.bfloat16, blocks of 32; this model has torch\.bfloat16, 16"):
        PagedLoop(loaded, block_size=32).logits([1])


def test_a_step_fills_the_profile(tmp_path: Path) -> None:
    loop = native(make_tiny_model(tmp_path), "int8")
    assert isinstance(loop.loaded.model, NativeModel)
    loop.loaded.model.profile = Profile()
    loop.logits(prompt(200))
    spent = loop.loaded.model.profile.nanoseconds()
    stages = sum(time for stage, time in spent.items() if stage != "total")
    assert min(spent.values()) > 0
    assert stages <= spent["total"]
