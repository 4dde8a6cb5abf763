"""A model compiles few kernels, all ahead of requests: none is compiled for a number of tokens, a context or a table."""

from __future__ import annotations

import pytest

from tests.engine.kernels.triton.test_compiles import spoken


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("weights", "most"),
    [("none", 11), ("int8", 30), ("int4", 30), ("experts none", 19), ("experts int8", 36), ("adapters", 11 + 8), ("latents", 13)],
)
def test_steps_of_all_sizes_compile_nothing_that_was_not_prepared(weights: str, most: int) -> None:
    (counted,) = spoken("sweep", weights)
    assert counted["later"] == {}
    assert sum(counted["warmed"].values()) <= most
