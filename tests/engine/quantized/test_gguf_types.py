"""GGUF's types of blocks that llama.cpp's files hold: dequantized like the gguf package, in the model's layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from pdmesh.engine.loader.gguf.blocks import dequantize_rows
from pdmesh.engine.loader.gguf.source import GgufSource
from tests.engine import tiny_gguf
from tests.engine.paged_loop import PagedLoop, load
from tests.support.tiny_models import make_tiny_model

TYPES = [
    Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1,
    Type.Q8_0, Type.F16, Type.BF16, Type.F32,
]  # fmt: skip
HALVES = {  # bytes of a block where its float16 numbers begin
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}  # fmt: skip


def blocks(kind: Type, rows: int, width: int) -> np.ndarray:
    """Random bytes, with small numbers where a block has its scales: the package cannot quantize to these types."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    data = generator.integers(0, 256, (rows, width // size, num_bytes), dtype=np.uint8)
    for start in HALVES[kind]:
        numbers = generator.uniform(-0.002, 0.002, (rows, width // size, 1)).astype(np.float16)
        data[:, :, start : start + 2] = numbers.view(np.uint8)
    return data.reshape(rows, -1)


def stored(values: np.ndarray, kind: Type) -> np.ndarray:
    return blocks(kind, *values.shape) if kind in HALVES else quantize(values, kind)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_blocks_are_those_of_the_gguf_package(kind: Type) -> None:
    values = np.random.default_rng(0).standard_normal((24, 512)).astype(np.float32)
    data = stored(values, kind)
    assert torch.equal(dequantize_rows(data, kind), torch.from_numpy(dequantize(data, kind).astype(np.float32)))


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind in HALVES], ids=lambda kind: kind.name)
def test_a_file_of_them_is_a_model(kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query and key rows too, which files hold in another order."""
    folder = make_tiny_model(tmp_path / "hf", "llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    monkeypatch.setattr(tiny_gguf, "quantize", stored)
    expected = tiny_gguf.write_gguf(folder, tmp_path / "model.gguf", types=lambda name: kind if "proj" in name else Type.F32)
    source = GgufSource(tmp_path / "model.gguf")
    for name, values in expected.items():
        assert torch.equal(source.get(name), torch.from_numpy(values)), name
    assert PagedLoop(load(tmp_path / "model.gguf")).logits([1, 2, 3]).isfinite().all()
