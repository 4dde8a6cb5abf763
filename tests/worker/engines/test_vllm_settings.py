"""Settings of a worker with vLLM: what its engine is given, what is refused by name, and where the package is missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdmesh.engine.config import EngineConfig
from pdmesh.runtime.config import ConfigError, parse, to_env
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines import registry
from pdmesh.worker.engines.registry import ENGINES, PACKAGES, Package, loader, require
from pdmesh.worker.engines.vllm_settings import (
    REFUSED,
    TAKEN,
    WITHOUT_EFFECT,
    engine_args,
    environment,
    parsed_args,
)

GIB = 1 << 30


def config(*flags: str, env: Mapping[str, str] | None = None) -> WorkerConfig:
    return parse(WorkerConfig, ["--engine", "vllm", *flags], env or {}, prog="worker")


def given(*flags: str) -> dict[str, object]:
    return engine_args(config("--model", "m", *flags), free_memory=lambda device: 10 * GIB)


def test_every_setting_of_our_engine_has_its_place() -> None:
    """A new field must be taken, refused, or known to be without effect."""
    fields = [field.name for field in dataclasses.fields(EngineConfig)]
    assert sorted([*TAKEN, *REFUSED, *WITHOUT_EFFECT]) == sorted(fields)


def test_what_vllm_is_given_by_default() -> None:
    assert given("--model-name", "small") == {
        "model": "m", "served_model_name": "small", "dtype": "auto", "seed": 0, "max_num_seqs": 64, "max_num_batched_tokens": 512,
        "enable_prefix_caching": True, "generation_config": "vllm", "kv_cache_memory_bytes": int(0.3 * 10 * GIB),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--dtype", "float32"], {"dtype": "float32"}),
        (["--block-size", "64"], {"block_size": 64}),
        (["--num-blocks", "99"], {"num_gpu_blocks_override": 99}),
        (["--kv-memory-mb", "64"], {"kv_cache_memory_bytes": 64 << 20}),
        (["--kv-memory-share", "0.5"], {"kv_cache_memory_bytes": 5 * GIB}),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "2048"], {"max_num_seqs": 8, "max_num_batched_tokens": 2048}),
        (["--max-context", "1024"], {"max_model_len": 1024}),
        (["--no-prefix-caching"], {"enable_prefix_caching": False}),
        (["--device", "cuda", "--kv-memory-share", "0.4"], {"gpu_memory_utilization": 0.4}),
        (["--max-loras", "3", "--max-lora-rank", "48"], {"max_loras": 3, "max_cpu_loras": 3, "max_lora_rank": 64}),
        (["--vllm-arg", "enforce-eager=true", "--vllm-arg", "revision=v1"], {"enforce_eager": True, "revision": "v1"}),
    ],
)  # fmt: skip
def test_a_flag_becomes_an_argument(flags: list[str], expected: dict[str, object]) -> None:
    found = given(*flags)
    assert {name: found.get(name) for name in expected} == expected


def test_what_is_not_given_is_left_to_vllm() -> None:
    assert not {"block_size", "num_gpu_blocks_override", "max_model_len", "enable_lora"} & given().keys()
    assert not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & given("--device", "cuda").keys()


def test_weights_come_out_of_the_memory_that_the_share_is_of(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4096)
    args = engine_args(config("--model", str(tmp_path), "--kv-memory-share", "0.5"), free_memory=lambda device: 8192)
    assert args["kv_cache_memory_bytes"] == 2048


def test_ranks_share_the_memory_and_the_threads() -> None:
    two = config("--model", "m", "--tensor-parallel", "2", "--kv-memory-mb", "64", "--num-threads", "4")
    args = engine_args(two)
    assert (args["tensor_parallel_size"], args["kv_cache_memory_bytes"]) == (2, 32 << 20)
    assert args["distributed_executor_backend"] == "mp"
    assert environment(two)["OMP_NUM_THREADS"] == "2" and environment(two)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "tensor_parallel_size" not in engine_args(config("--model", "m", "--kv-memory-mb", "64"))


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (["--backend", "torch"], "--backend"),
        (["--quantization", "int8"], "--quantization"),
        (["--kv-dtype", "int8"], "--kv-dtype"),
        (["--speculation", "prompt_lookup"], "--speculation"),
        (["--draft-model", "small"], "--draft-model"),
        (["--override", "rope_theta=1"], "--override"),
        (["--kv-shared"], "--kv-shared"),
        (["--max-retained-share", "0.5"], "--max-retained-share"),
        (["--tensor-parallel", "2", "--device", "cuda"], "--tensor-parallel"),
        (["--block-size", "24"], "--block-size"),
        (["--max-num-batched-tokens", "8"], "--max-num-batched-tokens"),
        (["--vllm-arg", "enforce_eager"], "--vllm-arg"),
        (["--vllm-arg", "seed=1", "--vllm-arg", "seed=2"], "--vllm-arg"),
        (["--vllm-arg", "max_num_seqs=9"], "--vllm-arg"),
        (["--vllm-arg", "tensor_parallel_size=2"], "--vllm-arg"),
    ],
)
def test_what_its_engine_cannot_be_told_is_refused_by_name(flags: list[str], flag: str) -> None:
    parse(WorkerConfig, ["--engine", "vllm", "--model", "m"], {}, prog="worker")
    with pytest.raises(ConfigError) as refused:
        config("--model", "m", *flags)
    assert refused.value.field == flag
    assert ";" in str(refused.value)  # what to do


def test_no_drafts_are_what_it_does_anyway() -> None:
    assert config("--model", "m", "--speculation", "none").engine.speculation == "none"


def test_a_variable_is_named_where_it_gave_the_setting() -> None:
    with pytest.raises(ConfigError, match="PDMESH_BACKEND: 'torch' does not go with vLLM"):
        config("--model", "m", env={"PDMESH_BACKEND": "torch"})


def test_a_file_of_another_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--model: vLLM reads folders"):
        config("--model", "m.gguf")


def test_arguments_of_vllm_need_vllm() -> None:
    with pytest.raises(ConfigError, match=r"--vllm-arg: goes with --engine vllm"):
        parse(WorkerConfig, ["--model", "m", "--vllm-arg", "enforce_eager=true"], {}, prog="worker")


def test_an_argument_that_vllm_lacks_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"vllm_args: .* no argument enforce_eagre; did you mean enforce_eager"):
        parsed_args(["enforce_eagre=true"], known=["enforce_eager", "model"])
    assert parsed_args(['hf_overrides={"a": 1}'], known=["hf_overrides"]) == {"hf_overrides": {"a": 1}}


def test_the_engine_is_a_setting_like_others() -> None:
    by_variable = parse(WorkerConfig, ["--model", "m"], {"PDMESH_ENGINE": "vllm", "PDMESH_VLLM_ARG": "a=1\nb=x"}, prog="worker")
    assert (by_variable.engine_name, by_variable.vllm_args) == ("vllm", ("a=1", "b=x"))
    assert parse(WorkerConfig, [], to_env(by_variable), prog="worker") == by_variable
    with pytest.raises(ConfigError, match=r"--engine: 'other' is not known; give one of pdmesh, vllm"):
        parse(WorkerConfig, ["--model", "m", "--engine", "other"], {}, prog="worker")


@pytest.mark.parametrize(("asked", "room"), [(None, 64), (100, 128)])
def test_room_for_the_ranks_of_the_adapters(tmp_path: Path, asked: int | None, room: int) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    flags = ["--lora", f"a={tmp_path}", *(["--max-lora-rank", str(asked)] if asked else [])]
    assert given(*flags)["max_lora_rank"] == room
    with pytest.raises(ValueError, match="lora: a: rank 8, and max_lora_rank is 4"):
        given("--lora", f"a={tmp_path}", "--max-lora-rank", "4")
    with pytest.raises(ValueError, match=r"lora: b: .*adapter_config.json cannot be read"):
        given("--lora", "b=nowhere")


def test_the_environment(tmp_path: Path) -> None:
    on_cpu = environment(config("--model", str(tmp_path), "--num-threads", "3"))
    assert on_cpu["HF_HUB_OFFLINE"] == "1" and on_cpu["VLLM_USE_AOT_COMPILE"] == "0"
    assert (on_cpu["OMP_NUM_THREADS"], on_cpu["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")
    on_gpu = environment(config("--model", "m", "--device", "cuda"))
    assert on_gpu == {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def test_a_thread_for_each_core_that_is_given() -> None:
    bound = dataclasses.replace(config("--model", "m"), cpus=(0, 1, 4))
    assert environment(bound)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment(dataclasses.replace(bound, cpus=()))


def test_a_package_that_is_missing_or_of_another_version_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    require("pdmesh", "cuda")
    nowhere = Package("no_such_module", ("no-such-module",), "0.32", "run `make setup-vllm`")
    monkeypatch.setattr(registry, "PACKAGES", {"vllm": nowhere})
    with pytest.raises(ConfigError, match=r"--engine: vllm: .* not installed here; run `make setup-vllm`"):
        require("vllm", "cpu")
    monkeypatch.setattr(registry, "PACKAGES", {"vllm": Package("pytest", ("pytest",), "0.32", "run `make setup-vllm`")})
    with pytest.raises(ConfigError, match=r"--engine: vllm: pytest [0-9.]+ is installed, and 0.32 is supported"):
        require("vllm", "cpu")
    supported = ".".join(pytest.__version__.split(".")[:2])
    monkeypatch.setattr(registry, "PACKAGES", {"vllm": Package("pytest", ("pytest",), supported, "")})
    require("vllm", "cuda")
    with pytest.raises(ConfigError, match=r"--device: the installed pytest .* is built for cuda"):
        require("vllm", "cpu")


def test_versions_of_one_minor() -> None:
    package = PACKAGES["vllm"]
    assert package.is_supported("0.32.0") and package.is_supported("0.32.1+cpu")
    assert not package.is_supported("0.33.0") and not package.is_supported("0.3.0")


def test_our_engine_is_loaded_by_its_name() -> None:
    assert loader("pdmesh").__module__ == "pdmesh.worker.engines.builtin"
    assert set(ENGINES) == {"pdmesh", "vllm"}


@pytest.mark.skipif(PACKAGES["vllm"].version() is None, reason="vllm is not installed here; make test-vllm has it")
def test_the_installed_vllm_has_these_arguments() -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {argument for argument in TAKEN.values() if argument} <= known
    assert given("--max-loras", "1", "--block-size", "32", "--num-blocks", "9", "--max-context", "64").keys() <= known
