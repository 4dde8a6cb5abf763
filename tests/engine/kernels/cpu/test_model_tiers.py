"""The native backend on the instruction tiers that this processor has beside its best, which all other tests run: close to torch
and to the oracle, and the same bits in every company. Not covered: tiers that the processor lacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmesh.engine.backend_selection import Numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu import isa
from pdmesh.engine.loader.loader import load_model
from tests.engine.backends import needs_native
from tests.engine.kernels.cpu.native_models import KV_DTYPES, SHAPES, native, prompt, reference
from tests.engine.kernels.cpu.oracle import LENGTH, Oracle, assert_rounds_as
from tests.engine.kernels.cpu.schedules import PROMPTS, play, runs
from tests.support.tiny_models import make_tiny_model

pytestmark = [needs_native, pytest.mark.timeout(400)]  # the first test of a tier compiles
# avx512_vnni differs from avx512_bf16 by one function, of which tests/engine/kernels/cpu/test_simd.py is the test.
TIERS = ("avx2", "portable")
FORMATS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "bfloat16"), ("int8", "int8"), ("int4", "bfloat16")]


@pytest.fixture(scope="module", params=TIERS)
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if isa.by_name(name) not in isa.supported():
        pytest.skip(f"this processor does not have {name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(isa.VARIABLE, name)
        yield name


def test_the_mode_names_the_tier(tier: str, tmp_path: Path) -> None:
    assert load_model(EngineConfig(model=str(make_tiny_model(tmp_path)))).numeric_mode == f"int8-native4-{tier}"


@pytest.mark.parametrize(
    "name", ["llama-bias", "mistral-window", "qwen3", "hidden-odd", "groups-50", "partial-rotary", "vocab-321"]
)
def test_logits_are_those_of_the_torch_backend(tier: str, name: str, tmp_path: Path) -> None:
    kind, overrides = SHAPES[name]
    folder = make_tiny_model(tmp_path, kind, **overrides)
    expected = reference(folder).logits(prompt(LENGTH))
    torch.testing.assert_close(native(folder, "float32").logits(prompt(LENGTH), 100), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_it_rounds_where_its_formats_ask_for_it(tier: str, weights: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", head_dim=32, initializer_range=0.05)
    plain = reference(folder).logits(prompt(LENGTH))
    for kv_dtype in KV_DTYPES:
        loop = native(folder, weights, kv_dtype=kv_dtype)
        numerics = Numerics("native", weights, 32 if weights == "int4" else 0, torch.bfloat16, loop.loaded.kv_dtype)
        assert_rounds_as(Oracle(folder, numerics), loop, plain)


@pytest.mark.parametrize(("weights", "kv_dtype"), FORMATS)
def test_company_and_chunks_change_no_bit(tier: str, weights: str, kv_dtype: str, tmp_path: Path) -> None:
    kind, overrides = SHAPES["qwen2-window"]
    folder = make_tiny_model(tmp_path, kind, **overrides)
    loops = [native(folder, weights, kv_dtype=kv_dtype, num_threads=threads, num_blocks=900) for threads in (1, 2)]
    alone = [loops[0].logits(tokens) for tokens in PROMPTS]

    @given(st.data())
    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    def check(data: st.DataObject) -> None:
        count = data.draw(st.sampled_from([1, 2, 3, 5, 8, 13, 40]))
        for loop in loops:
            play(loop, data.draw(st.lists(runs(), min_size=count, max_size=count)), alone)

    check()
