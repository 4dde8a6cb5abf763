"""Which backend computes a model, in which numbers: every choice, every refusal, and torch where there are no kernels."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.engine.backend_selection import Numerics, choose_numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.cpu import build, isa
from pdmesh.engine.kernels.cpu.model import NativeModel, why_not
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.models.config import ExpertsConfig, LatentConfig, ModelConfig
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.backends import needs_native
from tests.support.mock_engine import open_engine
from tests.support.tiny_models import make_tiny_model

Settings = dict[str, Any]
SIZES = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
F32, BF16, F16, I8 = torch.float32, torch.bfloat16, torch.float16, torch.int8


def model(dtype: str | None = "bfloat16", **changes: Any) -> ModelConfig:
    return model_config({**SIZES, "dtype": dtype, **changes})


def chosen(
    of: ModelConfig | None = None, *, has_int4: bool = False, no_library: str = "", no_triton: str = "", **settings: object
) -> Numerics:
    config = EngineConfig(model="m", **settings)  # type: ignore[arg-type]
    config.validate()
    return choose_numerics(config, of or model(), has_int4=has_int4, no_library=no_library, no_triton=no_triton)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("int8", 0, BF16, I8)),
        ({"backend": "native"}, ("int8", 0, BF16, I8)),
        ({"quantization": "int8"}, ("int8", 0, BF16, I8)),
        ({"quantization": "int8", "dtype": "bfloat16"}, ("int8", 0, BF16, BF16)),
        ({"quantization": "int8", "dtype": "float32"}, ("int8", 0, F32, F32)),
        ({"quantization": "int4", "dtype": "float32", "kv_dtype": "bfloat16"}, ("int4", 32, F32, BF16)),
        ({"quantization": "int4"}, ("int4", 32, BF16, I8)),
        ({"quantization": "int4", "quantization_group": 128}, ("int4", 128, BF16, I8)),
        ({"quantization": "int8", "quantization_group": 128}, ("int8", 0, BF16, I8)),
        ({"quantization": "none"}, ("bfloat16", 0, BF16, BF16)),
        ({"dtype": "bfloat16"}, ("bfloat16", 0, BF16, BF16)),
        ({"dtype": "float32"}, ("float32", 0, F32, F32)),
        ({"dtype": "float32", "quantization": "none"}, ("float32", 0, F32, F32)),
        ({"dtype": "float32", "kv_dtype": "int8"}, ("float32", 0, F32, I8)),
        ({"dtype": "bfloat16", "kv_dtype": "float32"}, ("bfloat16", 0, BF16, F32)),
        ({"kv_dtype": "int8"}, ("int8", 0, BF16, I8)),
        ({"kv_dtype": "bfloat16"}, ("int8", 0, BF16, BF16)),
        ({"kv_dtype": "float32"}, ("int8", 0, BF16, F32)),
        ({"quantization": "int4", "kv_dtype": "bfloat16"}, ("int4", 32, BF16, BF16)),
    ],
)
def test_the_native_backend_is_the_default(settings: Settings, expected: tuple[object, ...]) -> None:
    numerics = chosen(**settings)
    assert (numerics.weights, numerics.group, numerics.dtype, numerics.kv_dtype) == expected
    assert (numerics.backend, numerics.why_torch) == ("native", "")


LATENT = LatentConfig(query_rank=0, kv_rank=32, nope_dim=16, rope_dim=32, value_dim=16)


@pytest.mark.parametrize(
    ("of", "kv_dtype"),
    [
        (model(model_type="mistral", sliding_window=32), I8),
        (model(model_type="qwen3"), I8),  # norms of queries and keys
        (model(model_type="gemma3_text", head_dim=16), I8),
        (model(model_type="qwen2"), BF16),  # biases
        (model(attention_bias=True), BF16),
        (model(model_type="qwen3", attention_bias=True), BF16),
        (model(model_type="phi", qk_layernorm=True), BF16),
        (replace(model(), qk_norm="heads", qk_norm_bias=True), BF16),
        (replace(model(), latent=LATENT), BF16),
    ],
    ids=lambda each: each.model_type if isinstance(each, ModelConfig) else None,
)
def test_keys_that_may_not_fit_8_bits_are_as_wide_as_activations(of: ModelConfig, kv_dtype: torch.dtype) -> None:
    """A bias behind the projection or behind the norm, and latents; whoever asks for int8 gets it."""
    assert of.suits_int8_kv == (kv_dtype == I8)
    for weights in ("auto", "int8", "int4"):
        numerics = chosen(of, quantization=weights)
        assert (numerics.backend, numerics.kv_dtype) == ("native", kv_dtype)
    assert chosen(of, kv_dtype="int8").kv_dtype == I8


@pytest.mark.parametrize(
    ("settings", "weights"), [({}, "int4"), ({"quantization": "int8"}, "int8"), ({"dtype": "bfloat16"}, "bfloat16")]
)
def test_a_checkpoint_of_4_bits_stays_so(settings: Settings, weights: str) -> None:
    assert chosen(has_int4=True, **settings).weights == weights


@pytest.mark.parametrize(
    ("dtype", "settings", "backend", "weights"),
    [
        ("float32", {"quantization": "none"}, "native", "float32"),
        (None, {"quantization": "none"}, "native", "float32"),
        ("float16", {}, "native", "int8"),
        ("float16", {"quantization": "none"}, "torch", "float16"),
        ("float16", {"quantization": "int4"}, "native", "int4"),
        ("bfloat16", {"dtype": "float16"}, "torch", "float16"),
        ("bfloat16", {"backend": "torch"}, "torch", "bfloat16"),
        (None, {"backend": "torch"}, "torch", "float32"),
        ("bfloat16", {"backend": "torch", "dtype": "float32", "kv_dtype": "float32"}, "torch", "float32"),
        ("bfloat16", {"backend": "torch", "quantization": "none"}, "torch", "bfloat16"),
        ("bfloat16", {"device": "cuda"}, "triton", "bfloat16"),
        ("bfloat16", {"device": "cuda", "backend": "torch"}, "torch", "bfloat16"),
        ("bfloat16", {"device": "cuda", "dtype": "float16", "quantization": "int8"}, "triton", "int8"),
        ("bfloat16", {"device": "cuda", "quantization": "int4"}, "triton", "int4"),
        ("bfloat16", {"device": "cuda", "quantization": "fp8"}, "triton", "fp8"),
        ("float32", {"backend": "triton"}, "triton", "float32"),
    ],
)
def test_the_dtype_is_the_checkpoints_or_as_asked(dtype: str | None, settings: Settings, backend: str, weights: str) -> None:
    numerics = chosen(model(dtype), **settings)
    assert (numerics.backend, numerics.weights) == (backend, weights)
    if backend != "native":
        assert numerics.kv_dtype == numerics.dtype


UNCOVERED = [
    (model(), {}, "there is no compiler"),
    (model(hidden_size=32), {}, "head_dim 8 is not a multiple of 16 up to 512"),
    (model(head_dim=528), {}, "head_dim 528 is not"),
    (model(), {"block_size": 8}, "block_size 8 is not a multiple of 16"),
    (model(model_type="mistral", sliding_window=0), {}, "a sliding window of no tokens"),
    (model(), {"dtype": "float16"}, "it has no float16"),
]


@pytest.mark.parametrize(("of", "settings", "reason"), UNCOVERED)
def test_torch_serves_where_the_kernels_cannot(of: ModelConfig, settings: Settings, reason: str) -> None:
    no_library = reason if "compiler" in reason else ""
    numerics = chosen(of, no_library=no_library, **settings)
    assert numerics.backend == "torch"
    assert numerics.dtype == numerics.kv_dtype
    assert reason in numerics.why_torch
    with pytest.raises(ValueError, match=f"^backend: native cannot run this: {reason}.*; give backend=torch, or auto"):
        chosen(of, no_library=no_library, backend="native", **settings)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"backend": "torch", "quantization": "int8"}, "quantization: int8 needs backend=native; give none"),
        ({"backend": "torch", "quantization": "int4"}, "quantization: int4 needs backend=native; give none"),
        ({"backend": "torch", "kv_dtype": "int8"}, "kv_dtype: int8 needs backend=native; give auto"),
        ({"backend": "torch", "kv_dtype": "float32"}, "kv_dtype: float32 needs backend=native; give auto"),
        ({"device": "cuda", "backend": "native"}, "backend: native cannot run this: it is for device=cpu, this is cuda"),
        ({"device": "cuda", "backend": "torch", "quantization": "int8"}, "quantization: int8 needs backend=triton; give none"),
        (
            {"device": "cuda", "kv_dtype": "int8"},
            "kv_dtype: int8 needs backend=native; the Triton kernels have bfloat16 and fp8; give auto or fp8",
        ),
        (
            {"quantization": "fp8"},
            "quantization: fp8 needs backend=triton, which is for device=cuda; give int8, int4, none or auto",
        ),
        (
            {"kv_dtype": "fp8"},
            "kv_dtype: fp8 needs backend=triton, which is for device=cuda; give int8, which is as small, or auto",
        ),
        ({"backend": "native", "kv_dtype": "fp8"}, "kv_dtype: fp8 needs backend=triton"),
        ({"backend": "torch", "quantization": "fp8"}, "quantization: fp8 needs backend=triton; give none"),
        ({"backend": "torch", "kv_dtype": "fp8"}, "kv_dtype: fp8 needs backend=triton; give auto"),
        ({"device": "cuda", "backend": "torch", "kv_dtype": "fp8"}, "kv_dtype: fp8 needs backend=triton; give auto"),
        ({"quantization": "int8", "fp8_activations": True}, "fp8_activations: it goes with quantization=fp8; give that"),
        ({"block_size": 8, "quantization": "int4"}, r"quantization: int4 needs backend=native \(block_size 8 is not"),
        ({"block_size": 8, "kv_dtype": "int8"}, r"kv_dtype: int8 needs backend=native \(block_size 8 is not"),
    ],
)
def test_what_torch_cannot_compute_is_refused(settings: Settings, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        chosen(**settings)


WITHOUT_TRITON: list[tuple[ModelConfig, str, str]] = [
    (model(), "triton is not installed", "triton is not installed"),
    (model(head_dim=288), "", "head_dim 288 is more than 256"),
    (model(model_type="mistral", sliding_window=0), "", "a sliding window of no tokens"),
]


def test_ranks_share_experts_on_torch_alone() -> None:
    experts = ExpertsConfig(num_experts=4, top_k=2, intermediate_size=64, layers=(True, True))
    mixed = replace(model(), experts=experts)
    assert chosen(mixed, device="cuda").backend == "triton"
    numerics = chosen(mixed, device="cuda", tensor_parallel=2)
    assert (numerics.backend, numerics.why_torch[:17]) == ("torch", "tensor_parallel=2")


@pytest.mark.parametrize(("of", "no_triton", "reason"), WITHOUT_TRITON)
def test_torch_serves_a_gpu_without_the_triton_kernels(of: ModelConfig, no_triton: str, reason: str) -> None:
    numerics = chosen(of, no_triton=no_triton, device="cuda")
    assert (numerics.backend, numerics.weights, numerics.why_torch) == ("torch", "bfloat16", reason)
    with pytest.raises(ValueError, match=f"^backend: triton cannot run this: {reason}; give backend=torch, or auto"):
        chosen(of, no_triton=no_triton, device="cuda", backend="triton")
    with pytest.raises(ValueError, match=rf"^quantization: int8 needs backend=triton \({reason}\)"):
        chosen(of, no_triton=no_triton, device="cuda", quantization="int8")


def test_memory_of_weights_on_the_triton_kernels() -> None:
    """Plain ones once, with a head that is the embedding; quantized ones beside the embedding, the head in 8 bits."""
    of, num_weights = model(tie_word_embeddings=True), 10_000
    table = of.vocab_size * of.hidden_size
    plain, int8, int4, fp8 = (chosen(of, device="cuda", quantization=form) for form in ("none", "int8", "int4", "fp8"))
    assert fp8.num_bytes(of, num_weights) == int8.num_bytes(of, num_weights)
    assert plain.num_bytes(of, num_weights) == 2 * num_weights
    assert int8.num_bytes(of, num_weights) == (num_weights - table) + table * (2 + 1)
    assert int4.num_bytes(of, num_weights) == int((num_weights - table) * 0.625) + table * (2 + 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_pool_in_fp8_goes_with_every_dtype_of_the_triton_kernels(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    plain, narrow = (chosen(device="cuda", dtype=dtype, kv_dtype=kv) for kv in ("auto", "fp8"))
    assert (plain.kv_dtype, narrow.kv_dtype) == (getattr(torch, dtype), torch.float8_e4m3fn)
    assert plain.name("k") == narrow.name("k")  # they exchange KV, which is converted


def test_rounded_activations_are_another_mode() -> None:
    modes = [chosen(device="cuda", quantization="fp8", fp8_activations=rounds).name("k") for rounds in (False, True)]
    assert modes == ["fp8-k", "fp8a8-k"]


def test_float16_beside_quantized_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dtype: float16 does not go with quantization=int8; give bfloat16, float32 or auto"):
        chosen(dtype="float16", quantization="int8")


def test_an_unknown_dtype_of_a_checkpoint_is_named() -> None:
    both: list[Settings] = [{"quantization": "none"}, {"backend": "torch"}]
    for settings in both:
        with pytest.raises(ValueError, match="dtype: the checkpoint's 'float8_e4m3fn' is not supported; give one of float32"):
            chosen(model("float8_e4m3fn"), **settings)


def test_modes_name_all_that_decides_bits() -> None:
    several: list[Settings] = [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"quantization": "int4"},
        {"quantization": "int4", "quantization_group": 64},
        {"quantization": "int8", "dtype": "float32", "kv_dtype": "bfloat16"},
    ]
    modes = {chosen(**settings).name(kernels) for kernels in ("native-avx2", "native-portable") for settings in several}
    assert len(modes) == 12
    assert {"int8-native-avx2", "int4g64-native-portable", "bfloat16-native-avx2"} <= modes


# ---- the loader


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path / "cache"))
    for name in ("CXX", "PDMESH_KERNELS_DIR"):
        monkeypatch.delenv(name, raising=False)
    if (build.SOURCES / "prebuilt").exists():
        pytest.skip("there are kernels built ahead")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def load(folder: Path, **settings: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), num_blocks=20, **settings))  # type: ignore[arg-type]


def assert_served_by_torch(loaded: LoadedModel, config: EngineConfig) -> None:
    """It is loaded, and it computes."""
    assert isinstance(loaded.model, DecoderModel)
    assert loaded.numeric_mode.startswith("float32-cpu-")
    engine = open_engine(config, loaded)
    engine.add(EngineRequest("r", (1, 2, 3), SamplingParams(max_tokens=1)))
    result = engine.step()
    assert result is not None
    assert len(result.updates) == 1


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_serves_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="engine"):
        loaded = load(folder)
    assert "the slower torch backend computes this model: no C++ compiler is on PATH" in caplog.text
    assert "apt install g++" in caplog.text
    assert_served_by_torch(loaded, EngineConfig(model=str(folder), num_blocks=20))
    with pytest.raises(ValueError, match=r"backend: native cannot run this: no C\+\+ compiler is on PATH"):
        load(folder, backend="native")
    with pytest.raises(ValueError, match=r"quantization: int8 needs backend=native \(no C\+\+ compiler"):
        load(folder, quantization="int8")


@pytest.mark.usefixtures("no_compiler")
def test_torch_needs_no_compiler_and_warns_of_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(load(folder, backend="torch").model, DecoderModel)
    assert not caplog.records


@pytest.mark.usefixtures("no_compiler")
def test_a_compiler_that_fails_is_as_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert isinstance(load(folder).model, DecoderModel)
    assert "the CPU kernels did not compile" in caplog.text
    with pytest.raises(ValueError, match="backend: native cannot run this: the CPU kernels did not compile"):
        load(folder, backend="native")


@needs_native
@pytest.mark.parametrize(
    ("overrides", "settings", "reason"),
    [
        ({"hidden_size": 32}, {}, "head_dim 8 is not a multiple of 16"),
        ({}, {"block_size": 8}, "block_size 8 is not a multiple of 16"),
    ],
)
def test_a_model_that_is_not_covered_is_served_by_torch_with_a_warning(
    overrides: dict[str, Any], settings: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(tmp_path, **overrides)
    loaded = load(folder, **settings)
    assert f"the slower torch backend computes this model: {reason}" in caplog.text
    assert_served_by_torch(loaded, EngineConfig(model=str(folder), num_blocks=20, **settings))
    with pytest.raises(ValueError, match=f"backend: native cannot run this: {reason}.*; give backend=torch, or auto"):
        load(folder, backend="native", **settings)


@needs_native
def test_the_native_backend_loads_without_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(folder)
    assert isinstance(loaded.model, NativeModel)
    assert (loaded.dtype, loaded.kv_dtype) == (BF16, I8)
    assert loaded.numeric_mode == f"int8-native4-{isa.detect().mode}"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@needs_native
def test_a_wrong_tier_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, "avx1024")
    with pytest.raises(ValueError, match="PDMESH_CPU_ISA: 'avx1024' is no instruction tier; choose one of"):
        load(folder)


def test_what_is_covered() -> None:
    assert all(why_not(model(head_dim=dim), 16) is None for dim in (16, 48, 128, 512))
    assert all(why_not(model(), size) is None for size in (16, 32, 48, 256))
