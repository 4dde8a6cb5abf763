"""GGUF blocks: equal to what the gguf package makes of them; 4 bits stay the 4 bits of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.engine.loader.gguf.blocks import dequantize_rows, int4_rows
from pdmesh.engine.loader.gguf.source import GgufSource
from pdmesh.engine.loader.quantize import dequantize_int4
from pdmesh.engine.loader.safetensors import MissingTensor, SafetensorsSource
from tests.engine.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny_model

QUERY, VALUE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"
DOWN, EMBEDDING = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"


def random(seed: int, rows: int, width: int, magnitude: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, width)) * magnitude).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from([Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q5_0, Type.F16, Type.BF16, Type.F32]),
    st.sampled_from([1e-6, 0.05, 30.0]),
)
def test_every_type_has_the_values_of_the_gguf_package(seed: int, rows: int, blocks: int, kind: Type, magnitude: float) -> None:
    data = quantize(random(seed, rows, blocks * 32, magnitude), kind)
    expected = torch.from_numpy(dequantize(data, kind).astype(np.float32))
    assert torch.equal(dequantize_rows(data, kind), expected)
    weight = int4_rows(data, kind)
    assert (weight is not None) == (kind in (Type.Q4_0, Type.Q4_1))
    if weight is not None:
        assert (weight.group, weight.scales.dtype, weight.minimums.dtype) == (32, torch.float16, torch.float16)
        assert torch.equal(dequantize_int4(weight), expected)


def test_a_q4_0_minimum_beyond_float16_is_left_to_floats() -> None:
    original = np.linspace(-70000, 60000, 32, dtype=np.float32)[None]
    data = quantize(original, Type.Q4_0)
    assert int4_rows(data, Type.Q4_0) is None
    assert torch.equal(dequantize_rows(data, Type.Q4_0), torch.from_numpy(dequantize(data, Type.Q4_0)))


@pytest.fixture(params=[Type.Q4_0, Type.Q4_1], ids=["Q4_0", "Q4_1"])
def gguf(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[GgufSource, dict[str, np.ndarray]]:
    def gguf_type(name: str) -> Type:
        return request.param if "proj" in name and "v_proj" not in name else Type.F32 if "norm" in name else Type.Q8_0

    expected = write_gguf(make_tiny_model(tmp_path / "hf"), tmp_path / "model.gguf", types=gguf_type)
    return GgufSource(tmp_path / "model.gguf"), expected


@pytest.mark.parametrize("name", [QUERY, QUERY.replace("q_proj", "k_proj"), DOWN])
def test_4_bits_of_a_file_are_taken_as_they_are(gguf: tuple[GgufSource, dict[str, np.ndarray]], name: str) -> None:
    """Query and key rows too, which the file holds in another order."""
    source, expected = gguf
    weight = source.get_int4(name)
    assert weight is not None
    assert torch.equal(dequantize_int4(weight), torch.from_numpy(expected[name]))
    assert torch.equal(source.get(name), torch.from_numpy(expected[name]))


def test_other_types_and_groups_are_not_4_bits(gguf: tuple[GgufSource, dict[str, np.ndarray]], tmp_path: Path) -> None:
    source, _ = gguf
    assert source.get_int4(VALUE, 32) is None
    assert source.get_int4(EMBEDDING, 32) is None
    assert source.get_int4(DOWN, 64) is None
    assert SafetensorsSource(tmp_path / "hf").get_int4(DOWN, 32) is None
    with pytest.raises(MissingTensor, match=r"no tensor for 'nowhere'"):
        source.get_int4("nowhere", 64)
