"""Rotary embedding: what the comparison with transformers does not cover."""

from __future__ import annotations

import pytest
import torch

from pdmesh.engine.models.layers import RotaryTable, rotate
from pdmesh.engine.models.rope import RopeConfig


def config(**params: object) -> RopeConfig:
    return RopeConfig.from_dict({"rope_parameters": {"rope_theta": 100.0, **params}}, head_dim=8, max_context=16)


def test_a_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    table = RotaryTable(config(), 16, dtype=torch.float32)
    query, key = torch.randn(2, 1, 1, 8)
    near = [rotate(x, *table.at(torch.tensor([p]))) for x, p in ((query, 5), (key, 2))]
    far = [rotate(x, *table.at(torch.tensor([p]))) for x, p in ((query, 15), (key, 12))]
    torch.testing.assert_close(near[0].norm(), query.norm())
    torch.testing.assert_close((near[0] * near[1]).sum(), (far[0] * far[1]).sum(), atol=1e-5, rtol=1e-4)


def test_partial_rotation_leaves_the_rest_of_a_head() -> None:
    table = RotaryTable(config(partial_rotary_factor=0.5), 16, dtype=torch.float32)
    x = torch.randn(3, 2, 8)
    rotated = rotate(x, *table.at(torch.tensor([1, 2, 3])))
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    whole = RotaryTable(RopeConfig.from_dict({"rope_theta": 100.0}, head_dim=4, max_context=16), 16, dtype=torch.float32)
    assert torch.equal(rotated[..., :4], rotate(x[..., :4].contiguous(), *whole.at(torch.tensor([1, 2, 3]))))


def test_dynamic_frequencies_change_only_beyond_the_models_context() -> None:
    plain = RotaryTable(config(), 40, dtype=torch.float32)
    dynamic = RotaryTable(config(rope_type="dynamic", factor=3.0), 40, dtype=torch.float32)
    assert torch.equal(plain.cos[:16], dynamic.cos[:16])
    assert not torch.equal(plain.cos[16:], dynamic.cos[16:])
    assert dynamic.num_positions == 40


def test_an_unknown_scaling_is_named() -> None:
    with pytest.raises(ValueError, match="rope_type 'proportional' is not supported"):
        config(rope_type="proportional")
