"""Configuration of an engine: which model, on what device, with how much memory and how wide a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pdmesh import overrides
from pdmesh.adapter_id import MAX_RANK, named_folder
from pdmesh.engine.speculation.registry import PROPOSERS

DEVICES = ("cpu", "cuda")
MAX_THREADS = 1024  # torch crashes when the system refuses to start a thread
DTYPES = ("auto", "float32", "bfloat16", "float16")
BACKENDS = ("auto", "native", "triton", "torch")
QUANTIZATIONS = ("auto", "none", "int8", "int4", "fp8")
QUANTIZATION_GROUPS = (32, 64, 128)
KV_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8")
MAX_DRAFT_TOKENS = 64
DEFAULT_LORAS, MAX_LORAS = 8, 256


def default_kv_share(device: str) -> float:
    """Return the share of free memory for KV: a GPU is the worker's own, and the memory of steps is counted; a CPU's is
    shared."""
    return 0.85 if device == "cuda" else 0.3


@dataclass(frozen=True)
class EngineConfig:
    """Configure one engine. Each `help` is shown by `--help`."""

    model: str = field(metadata={"help": "model folder (Hugging Face, safetensors) or .gguf file"})
    override: tuple[str, ...] = field(default=(), metadata={"help": overrides.HELP, "repeated": True})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    dtype: str = field(
        default="auto", metadata={"help": "float32, bfloat16, float16, auto (the checkpoint's); quantized: bfloat16"}
    )
    backend: str = field(default="auto", metadata={"help": "native (CPU), triton (CUDA), torch, or auto: kernels where they can"})
    quantization: str = field(
        default="auto",
        metadata={"help": "weights: int8, int4, fp8 (triton), none (dtype), or auto: native with dtype=auto quantizes, int8"},
    )
    quantization_group: int = field(default=32, metadata={"help": "int4: inputs that share a scale: 32, 64 or 128"})
    packed_cache: str = field(
        default="auto",
        metadata={
            "help": "native: GB of disk for packed weights, which the next start maps; auto (half of what is free), or off"
        },
    )
    packed_pages: str = field(
        default="large",
        metadata={
            "help": "native: where files have no large pages, weights lie in large ones (a copy in each worker: steps are 5 to "
            "8 % faster) or are shared by all workers of the host: large or shared"
        },
    )
    fp8_activations: bool = field(
        default=False, metadata={"help": "fp8: more than 128 rows are multiplied in fp8 too: twice the rate, off by up to 1/16"}
    )
    kv_dtype: str = field(
        default="auto",
        metadata={"help": "KV cache: float32, bfloat16, int8 (native), fp8 (triton), or auto: docs/cpu.md, docs/gpu.md"},
    )
    block_size: int = field(default=16, metadata={"help": "tokens in one KV block"})
    num_blocks: int = field(default=0, metadata={"help": "KV blocks; 0: as many as the KV memory holds"})
    kv_memory_mb: int = field(default=0, metadata={"help": "MiB for the KV pool; 0: a share of what the device has free"})
    kv_memory_share: float = field(
        default=0.0,
        metadata={"help": "share of the device's free memory for the KV pool; 0: 0.3 of a CPU's, 0.85 of a GPU's"},
    )
    kv_shared: bool = field(
        default=False,
        metadata={"help": "KV pool in memory that other processes may map; always so with role prefill"},
    )
    max_num_seqs: int = field(default=64, metadata={"help": "sequences reserved, waiting and running at once"})
    max_num_batched_tokens: int = field(default=512, metadata={"help": "token budget of one step"})
    keep_pace: bool = field(
        default=True, metadata={"help": "steps hold only so much of prompts as running sequences with a TPOT objective can spare"}
    )
    max_context: int = field(default=0, metadata={"help": "longest sequence in tokens; 0: the model's"})
    prefix_caching: bool = field(default=True, metadata={"help": "share KV blocks between prompts with equal beginnings"})
    max_retained_share: float = field(
        default=0.25,
        metadata={"help": "share of KV blocks that one tenant may retain for its sessions' next requests; 0: none are"},
    )
    speculation: str = field(
        default="auto",
        metadata={"help": "proposers of draft tokens: auto (as far as it pays), none, or names joined by commas"},
    )
    draft_model: str = field(default="", metadata={"help": "a smaller model with the same vocabulary, as draft model"})
    draft_heads: str = field(
        default="", metadata={"help": "trained draft heads; empty: draft_heads.safetensors beside the model"}
    )
    self_draft_layers: int = field(default=0, metadata={"help": "draft with the model's first so many layers; 0: off"})
    max_draft_tokens: int = field(
        default=16, metadata={"help": f"most draft tokens of a sequence in a step, up to {MAX_DRAFT_TOKENS}"}
    )
    draft_length: int = field(default=0, metadata={"help": "draft so many tokens, whatever the cost; 0: as many as pay"})
    steps_ahead: bool = field(
        default=True, metadata={"help": "triton: launch a decode step before the tokens of the one before it are read"}
    )
    lora: tuple[str, ...] = field(
        default=(),
        metadata={"help": "LoRA adapter, NAME=FOLDER, that requests may ask for by NAME", "repeated": True},
    )
    max_loras: int = field(
        default=0, metadata={"help": "LoRA adapters that may be loaded at once; 0: 8 with --lora, none without"}
    )
    max_lora_rank: int = field(
        default=0, metadata={"help": "triton: largest rank of a LoRA adapter; 0: that of --lora, 64 at least"}
    )
    num_threads: int = field(default=0, metadata={"help": "threads that compute; 0: one for each core"})
    core_table: str = field(
        default="",
        metadata={"help": "native: file by which workers of a host lend each other idle cores; empty: none are lent"},
    )
    shared_cores: int = field(
        default=0,
        metadata={"help": "native: cores that all workers of --core-table have together; 0: those of its present workers"},
    )
    tensor_parallel: int = field(
        default=1, metadata={"help": "processes (on CUDA: GPUs) that share the model; not with the native backend"}
    )
    expert_parallel: bool = field(
        default=False, metadata={"help": "these processes have whole experts each, in place of a part of every one"}
    )
    tensor_parallel_timeout_s: float = field(
        default=30.0, metadata={"help": "a process of them that is silent so long in a step, or in a copy of KV, ends the worker"}
    )

    def validate(self) -> None:
        """Raise ValueError, naming the field and what to do, for settings that are wrong with every model."""
        if not self.model:
            raise ValueError("model: empty; give a model folder or a .gguf file")
        overrides.check(self.override)
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _check_packed_cache(self.packed_cache)
        _one_of("packed_pages", self.packed_pages, ("large", "shared"))
        if self.fp8_activations and self.quantization != "fp8":
            raise ValueError("fp8_activations: it goes with quantization=fp8; give that, or leave it out")
        if self.quantization_group not in QUANTIZATION_GROUPS:
            raise ValueError(f"quantization_group: {self.quantization_group} is not known; give 32, 64 or 128")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_draft_tokens", "tensor_parallel"):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "num_blocks",
            "kv_memory_mb",
            "max_context",
            "num_threads",
            "shared_cores",
            "draft_length",
            "self_draft_layers",
            "max_loras",
            "max_lora_rank",
        ):
            _at_least(name, getattr(self, name), 0)
        if self.num_threads > MAX_THREADS:
            raise ValueError(f"num_threads: {self.num_threads} is more than {MAX_THREADS}; give the cores that it may use")
        if not 0.0 <= self.kv_memory_share <= 1.0:
            raise ValueError(f"kv_memory_share: {self.kv_memory_share} is not in [0, 1]; give a share such as 0.3, or 0")
        if not 0.0 <= self.max_retained_share <= 1.0:
            raise ValueError(f"max_retained_share: {self.max_retained_share} is not in [0, 1]; give a share such as 0.25, or 0")
        if self.num_blocks and self.kv_memory_mb:
            raise ValueError("num_blocks and kv_memory_mb both size the KV pool; give one of them")
        self._check_drafts()
        self._check_ranks()
        self._check_adapters()

    @property
    def num_adapter_slots(self) -> int:
        """Return how many LoRA adapters may be loaded at once; 0: the model computes without a place for any."""
        return self.max_loras or (max(DEFAULT_LORAS, len(self.lora)) if self.lora else 0)

    @property
    def names_drafts(self) -> bool:
        """Return whether proposers, or what they draft with, are configured. `auto` by itself drafts with the native backend
        only: others may lose by it (docs/speculation.md)."""
        if self.speculation != "auto":
            return self.speculation != "none"
        return bool(self.draft_heads or self.draft_model or self.self_draft_layers or self.draft_length)

    def _check_adapters(self) -> None:
        try:
            names = [named_folder(text)[0] for text in self.lora]
        except ValueError as error:
            raise ValueError(f"lora: {error}") from error
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"lora: {', '.join(sorted(twice))} is given twice; give each adapter a name of its own")
        if self.max_loras and len(names) > self.max_loras:
            raise ValueError(f"lora: {len(names)} adapters, and max_loras is {self.max_loras}; raise it")
        if self.max_loras > MAX_LORAS:
            raise ValueError(f"max_loras: {self.max_loras} is more than {MAX_LORAS}; give at most that")
        if self.max_lora_rank > MAX_RANK:
            raise ValueError(f"max_lora_rank: {self.max_lora_rank} is more than {MAX_RANK}; give at most that")

    def _check_drafts(self) -> None:
        named_proposers(self.speculation)
        if self.max_draft_tokens > MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens: {self.max_draft_tokens} is more than {MAX_DRAFT_TOKENS}; give at most that")
        if self.draft_length > self.max_draft_tokens:
            raise ValueError(
                f"draft_length: {self.draft_length} is more than max_draft_tokens, {self.max_draft_tokens}; "
                "give at most that, or raise max_draft_tokens"
            )

    def _check_ranks(self) -> None:
        if not 0 < self.tensor_parallel_timeout_s < math.inf:
            raise ValueError(f"tensor_parallel_timeout_s: {self.tensor_parallel_timeout_s} is no time to wait; give seconds")

    def check_own_ranks(self) -> None:
        """Raise ValueError, as `validate` does, for settings that our own engine cannot split over ranks; another may."""
        if self.tensor_parallel == 1:
            return
        asked = f"tensor_parallel: {self.tensor_parallel}"
        if self.backend == "native" or (self.backend == "auto" and self.device == "cpu"):
            raise ValueError(f"{asked} does not go with the native backend for now; give backend=torch, or tensor_parallel=1")
        if named := {"draft_model", "self_draft"}.intersection(named_proposers(self.speculation)):
            raise ValueError(f"{asked} does not go with speculation={', '.join(sorted(named))} for now; give other proposers")
        if self.draft_model or self.self_draft_layers:
            raise ValueError(f"{asked} does not go with draft_model and self_draft_layers for now; leave them out")
        if self.num_adapter_slots:
            raise ValueError("lora, max_loras: adapters do not go with tensor_parallel for now; give tensor_parallel=1")


def named_proposers(speculation: str) -> tuple[str, ...]:
    """Return the names that EngineConfig.speculation lists, each once; none for `auto` and `none`. Raises ValueError for
    others."""
    if speculation in ("auto", "none"):
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in speculation.split(",")))
    for name in names:
        if name not in PROPOSERS:
            choice = f"give auto or none alone, or some of {', '.join(PROPOSERS)}, joined by commas"
            raise ValueError(f"speculation: {name!r} is not known; {choice}")
    return names


def _check_packed_cache(setting: str) -> None:
    if setting in ("auto", "off"):
        return
    try:
        is_size = 0 < float(setting) < math.inf
    except ValueError:
        is_size = False
    if not is_size:
        raise ValueError(f"packed_cache: {setting!r} is no size; give auto, off, or GB of disk such as 20")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} is not known; give one of {', '.join(allowed)}")


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name}: {value} is less than {minimum}; give at least {minimum}")
