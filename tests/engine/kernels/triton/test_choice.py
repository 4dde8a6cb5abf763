"""`backend=triton` from flags to tokens: the loader, an engine, the sampler on the device, what a step costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdmesh.doctor.step_profile import Case, StepProfiler
from pdmesh.engine.backend_selection import choose_numerics
from pdmesh.engine.config import EngineConfig
from pdmesh.engine.engine import Engine
from pdmesh.engine.kernels.triton.model import TritonModel
from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.kernels.triton.support import why_no_fp8_kv, why_not_here
from pdmesh.engine.loader.loader import LoadedModel, load_model
from pdmesh.engine.loader.quantize import (
    dequantize_fp8,
    dequantize_int4,
    dequantize_int8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from pdmesh.engine.loader.safetensors import read_config
from pdmesh.engine.request import EngineRequest
from pdmesh.sampling_params import SamplingParams
from tests.engine.kernels.triton.paged import DEVICE
from tests.engine.paged_loop import Chunk, PagedLoop
from tests.support.mock_engine import hash_block, run_to_end
from tests.support.tiny_models import make_tiny_model

PROMPTS = [(1, 2, 3), tuple(range(40))]
SAMPLINGS = [SamplingParams(temperature=0.0, max_tokens=4, logprobs=2), SamplingParams(temperature=0.8, seed=3, max_tokens=4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1, tie_word_embeddings=True)


def config_of(folder: Path, backend: str = "triton", **settings: object) -> EngineConfig:
    sizes = {"num_blocks": 16, "max_context": 64, "max_num_seqs": 4, "device": DEVICE, "dtype": "float32"}
    return EngineConfig(model=str(folder), backend=backend, **{**sizes, **settings})  # type: ignore[arg-type]


def answers(config: EngineConfig) -> list[tuple[int, ...]]:
    engine = Engine(config, hash_block=hash_block)
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        assert engine.add(EngineRequest(str(index), prompt, sampling))
    collector = run_to_end(engine)
    return [collector.answer(str(index)).token_ids for index in range(len(PROMPTS))]


def test_an_engine_on_it_draws_the_tokens_of_the_reference(folder: Path) -> None:
    assert answers(config_of(folder)) == answers(config_of(folder, "torch"))


def triton_of(loaded: LoadedModel) -> TritonModel:
    assert isinstance(loaded.model, TritonModel)
    return loaded.model


def test_what_is_loaded(folder: Path) -> None:
    loaded = load_model(config_of(folder))
    assert isinstance(loaded.sampler(), DeviceSampler)
    assert loaded.numeric_mode.startswith("float32-triton6-")
    assert loaded.kv_dtype == torch.float32


@pytest.fixture(scope="module", params=["int8", "int4", "fp8"])
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint whose linear maps quantization leaves as they are, but for the last bits, and its name."""
    form: str = request.param
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    folder = make_tiny_model(tmp_path_factory.mktemp(form), initializer_range=0.05, **sizes)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" in name and form == "int4":
            tensors[name] = dequantize_int4(quantize_int4(tensor, 32))
        elif "_proj" in name and form == "fp8":
            tensors[name] = dequantize_fp8(quantize_fp8(tensor))
        elif "_proj" in name or "lm_head" in name:
            tensors[name] = dequantize_int8(quantize_int8(tensor))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, form


def logits_of(loaded: LoadedModel) -> Tensor:
    """Of a prompt, which takes one kernel, and of a decode step, which takes another."""
    loop = PagedLoop(loaded, num_blocks=16)
    table = loop.table(24)
    chunks = [Chunk(table, range(20), 0, every_row=True), Chunk(table, [7], 20)]
    return torch.cat([loop.step([chunk]).clone() for chunk in chunks])


def test_quantized_weights_compute_what_they_stand_for(rounded: tuple[Path, str]) -> None:
    folder, form = rounded
    expected = logits_of(load_model(config_of(folder, "torch")))
    logits = logits_of(load_model(config_of(folder, quantization=form)))
    torch.testing.assert_close(logits, expected, atol=0.02 if form == "int4" else 1e-4, rtol=0)


def test_quantized_weights_are_read_as_they_are_held(rounded: tuple[Path, str]) -> None:
    folder, form = rounded
    loaded, plain = (load_model(config_of(folder, quantization=which, dtype="float16")) for which in (form, "none"))
    model = triton_of(loaded)
    assert loaded.numeric_mode.startswith(f"{'int4g32' if form == 'int4' else form}+float16-triton6-triton-{form}-")
    assert model.decoder.head.kind.startswith("triton-int8")
    share = model.bytes_per_step / triton_of(plain).bytes_per_step
    assert 0.3 < share < 0.45 if form == "int4" else 0.5 < share < 0.53


def test_rounded_activations_are_named_and_are_those_of_many_rows(rounded: tuple[Path, str]) -> None:
    """By torch's product of fp8 with fp8; a decode step of the same map is that without."""
    folder, form = rounded
    if form != "fp8":
        with pytest.raises(ValueError, match="fp8_activations: it goes with quantization=fp8"):
            load_model(config_of(folder, quantization=form, fp8_activations=True))
        return
    settings = {"quantization": "fp8", "dtype": "float16"}
    plain, loaded = (load_model(config_of(folder, **settings, fp8_activations=rounds)) for rounds in (False, True))
    assert plain.numeric_mode.startswith("fp8+float16-triton6-triton-fp8-tile128-mm-")
    assert loaded.numeric_mode.startswith("fp8a8+float16-triton6-triton-fp8-tile128-scaledmm-")
    exact, down = (triton_of(each).decoder.layers[0].gated_mlp.down for each in (plain, loaded))
    x = torch.randn((129, 256), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    assert torch.equal(down(x[:8]), exact(x[:8]))
    error = (down(x) - exact(x)).float().square().mean().sqrt() / exact(x).float().square().mean().sqrt()
    assert 2.0**-8 < error < 2.0**-4


def test_an_engine_says_what_its_steps_read(folder: Path) -> None:
    config = config_of(folder, quantization="int8")
    loaded = load_model(config)
    cost = Engine(config, hash_block=hash_block, loaded=loaded).cost
    assert (cost.backend, cost.numbers, cost.weight_bytes) == ("triton", "float32", triton_of(loaded).bytes_per_step)


def test_a_profile_names_who_computes(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^backend: triton computes this model, whose steps have no stages to show; give backend"
    ):
        StepProfiler(config_of(folder), [Case(1, 8)], 1)


def test_without_the_interpreter_a_cpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend: triton cannot run this: on device=cpu it runs in Triton's interpreter alone"):
        load_model(config_of(folder, device="cpu"))
    assert why_not_here("cuda") == ""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not_here("cpu") == ""
    assert "TRITON_INTERPRET=1 is set" in why_not_here("cuda")


def test_a_gpu_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not_here("cuda") == "Triton needs a C compiler, and there is no gcc or clang; install gcc, or name one by CC"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "there is no no-such-compiler" in why_not_here("cuda")


@pytest.mark.parametrize(
    ("capability", "is_enough"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_keys_in_fp8_need_ada_or_hopper(capability: tuple[int, int], is_enough: bool) -> None:
    reason = why_no_fp8_kv(capability)
    assert is_enough == (reason == "")
    assert is_enough or f"this has {capability[0]}.{capability[1]}" in reason


def test_a_gpu_that_is_too_old_for_keys_in_fp8_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("pdmesh.engine.backend_selection.shared_bytes", lambda device: 227 * 1024)
    with pytest.raises(ValueError, match=r"^kv_dtype: fp8 needs a GPU of compute capability 8.9 .* this has 8.0; give auto"):
        config = config_of(folder, device="cuda", kv_dtype="fp8")
        choose_numerics(config, read_config(folder), has_int4=False, no_library="", no_triton="")
