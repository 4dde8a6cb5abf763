"""Scales of KV in fp8 that a checkpoint brings: found by either name, and what is wrong with one is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdmesh.engine.loader.builder import open_checkpoint
from pdmesh.engine.loader.headers import check_headers
from pdmesh.engine.loader.kv_scales import known_scales, pool_scales, read_kv_scales
from pdmesh.engine.loader.safetensors import WeightSource
from tests.support.tiny_models import make_tiny_model

PREFIX = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def with_tensors(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> WeightSource:
    weights = load_file(folder / "model.safetensors") | {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return open_checkpoint(target)[0]


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")], ids=str)
@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float32), ((1,), torch.bfloat16)], ids=str)
def test_either_name_and_1_where_there_is_none(
    folder: Path, tmp_path: Path, names: tuple[str, str], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    scales = {name: torch.full(shape, scale, dtype=dtype) for name, scale in zip(names, (0.25, 0.5), strict=True)}
    assert read_kv_scales(with_tensors(folder, tmp_path, scales)) == ((1.0, 1.0), (0.25, 0.5))
    assert read_kv_scales(open_checkpoint(folder)[0]) == ((1.0, 1.0), (1.0, 1.0))
    assert check_headers(open_checkpoint(tmp_path)[0]) == [], "they are not named as tensors that nothing uses"


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ({"k_scale": torch.tensor(0.5)}, f"no tensor '{PREFIX}.v_scale'"),
        ({"v_proj.v_scale": torch.tensor(0.5)}, f"no tensor '{PREFIX}.k_proj.k_scale'"),
        (
            {"k_scale": torch.ones(2), "v_scale": torch.ones(2)},
            rf"{PREFIX}.k_scale: shape \(2,\); keys and values of a layer",
        ),
        ({"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(0.0)}, f"{PREFIX}.v_scale: 0.0 is no scale"),
        ({"k_scale": torch.tensor(float("nan")), "v_scale": torch.tensor(1.0)}, f"{PREFIX}.k_scale: nan is no scale"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, tmp_path: Path, scales: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_kv_scales(with_tensors(folder, tmp_path, scales))


def test_only_a_pool_in_fp8_refuses_a_checkpoint_for_its_scales(folder: Path, tmp_path: Path) -> None:
    """Others read them all the same: who has fp8 may push to them."""
    good = with_tensors(folder, tmp_path, {"k_scale": torch.tensor(0.25), "v_scale": torch.tensor(0.5)})
    assert known_scales(good, torch.bfloat16) == known_scales(good, torch.float8_e4m3fn) == ((1.0, 1.0), (0.25, 0.5))
    assert (pool_scales(good, torch.bfloat16), pool_scales(good, torch.float8_e4m3fn)[1]) == ((), (0.25, 0.5))
    bad = with_tensors(folder, tmp_path, {"k_scale": torch.ones(2), "v_scale": torch.ones(2)})
    assert known_scales(bad, torch.bfloat16) == pool_scales(bad, torch.bfloat16) == ()
    for read in (known_scales, pool_scales):
        with pytest.raises(ValueError, match="keys and values of a layer have one scale each"):
            read(bad, torch.float8_e4m3fn)
