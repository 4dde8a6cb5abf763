"""The native backend in bfloat16, int8 and int4, with every KV cache: close to an oracle that rounds where the formats ask for
it, far closer than to float32; and near enough to float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from pdmesh.engine.backend_selection import Numerics
from tests.engine.backends import needs_native
from tests.engine.kernels.cpu.native_models import KV_DTYPES, SHAPES, WEIGHTS, native, prompt, reference
from tests.engine.kernels.cpu.oracle import LENGTH, Oracle, assert_rounds_as, errors
from tests.engine.paged_loop import PagedLoop
from tests.engine.tiny_gguf import gguf_type, write_gguf
from tests.support.tiny_models import make_tiny_model

pytestmark = needs_native
NAMES = ["llama-bias", "qwen2-window", "qwen3", "hidden-72", "hidden-odd", "hidden-small", "groups-50", "partial-rotary"]
DIVERGENCE = {"float32": 1e-4, "bfloat16": 1e-4, "int8": 1e-3, "int4": 2e-2}  # nats for a token: several times what they have


def model(folder: Path, name: str) -> Path:
    kind, overrides = SHAPES[name]
    return make_tiny_model(folder, kind, **{"initializer_range": 0.05, **overrides})


def numerics(loop: PagedLoop, weights: str, group: int = 32) -> Numerics:
    return Numerics("native", weights, group if weights == "int4" else 0, loop.loaded.dtype, loop.loaded.kv_dtype)


@pytest.mark.parametrize("name", NAMES)
def test_it_rounds_where_its_formats_ask_for_it(name: str, tmp_path: Path) -> None:
    folder = model(tmp_path, name)
    plain = reference(folder).logits(prompt(LENGTH))
    divided = all(not width % 32 for width in (SHAPES[name][1].get(field, 64) for field in ("hidden_size", "intermediate_size")))
    for weights in WEIGHTS if divided else ("float32", "bfloat16", "int8"):
        for kv_dtype in KV_DTYPES[1:] if weights == "float32" else KV_DTYPES:
            loop = native(folder, weights, kv_dtype=kv_dtype)
            assert_rounds_as(Oracle(folder, numerics(loop, weights)), loop, plain)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_of_int4(group: int, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.05}
    folder = make_tiny_model(tmp_path, "qwen3", head_dim=32, **sizes)
    loop = native(folder, "int4", quantization_group=group)
    assert_rounds_as(Oracle(folder, numerics(loop, "int4", group)), loop, reference(folder).logits(prompt(LENGTH)))
    assert loop.loaded.numeric_mode.startswith(f"int4g{group}-native4-")


def test_a_group_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=72, head_dim=16)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.weight: quantization_group: 32 does not divide"):
        native(folder, "int4")


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, None], ids=["Q4_0", "Q4_1", "mixed"])
def test_a_gguf_of_4_bits_is_not_rounded_again(kind: Any, tmp_path: Path) -> None:
    folder, path = make_tiny_model(tmp_path / "hf", initializer_range=0.05), tmp_path / "model.gguf"
    write_gguf(folder, path, types=lambda name: kind if kind is not None and "_proj.weight" in name else gguf_type(name))
    plain, loop = reference(path).logits(prompt(LENGTH)), native(path)
    assert loop.loaded.numeric_mode.startswith("int4g32-native4-")
    assert_rounds_as(Oracle(path, numerics(loop, "int4")), loop, plain)
    if kind is not None:  # all of it 4 bits: what is off is the rounding of activations alone
        assert errors(loop.logits(prompt(LENGTH)), plain).mean() < 0.03


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_predictions_stay_near_those_of_float32(weights: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = model(tmp_path, "qwen3")
    expected = reference(folder).logits(prompt(LENGTH)).log_softmax(-1)
    actual = native(folder, weights, kv_dtype=kv_dtype).logits(prompt(LENGTH)).log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    assert divergence.mean() < DIVERGENCE[weights]
    assert divergence.max() < 10 * DIVERGENCE[weights]


def test_a_checkpoint_in_bfloat16_or_float16_loads(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        folder = make_tiny_model(tmp_path / dtype, "qwen3", dtype=dtype, initializer_range=0.05)
        for weights in ("int8", "float32", "bfloat16"):
            assert errors(native(folder, weights).logits(prompt(99)), reference(folder).logits(prompt(99))).mean() < 0.03
