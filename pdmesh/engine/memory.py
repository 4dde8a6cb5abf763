"""How much memory there is, and how much of it the KV pool gets. What does not fit is rejected, with the numbers."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import torch

from pdmesh.engine.attention.base import CHUNK_KEYS
from pdmesh.engine.config import EngineConfig, default_kv_share
from pdmesh.engine.kernels.cpu.model import kv_head_size
from pdmesh.engine.kv_cache.pool import KVShape
from pdmesh.engine.models.config import ModelConfig
from pdmesh.platform import fallbacks

MIB = 2**20
_FLOAT = 4


class DoesNotFit(ValueError):
    """Model or KV pool need more memory than there is; the message has the numbers and what to change."""


def return_freed_memory() -> None:
    """Give what was allocated at start and is free again back to the system: the C library keeps it, tens of MB in all."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def effective_max_context(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest sequence in tokens. Raises ValueError when more is configured than the model's positions reach."""
    if config.max_context <= model.max_context:
        return config.max_context or model.max_context
    if model.rope.rope_type == "dynamic" and config.max_context <= model.rope.factor * model.max_context:
        return config.max_context
    raise ValueError(
        f"max_context: {config.max_context} is more than the model's {model.max_context}; give at most that, or 0, "
        'or the scaling that the model\'s card names: --override rope_scaling=\'{"rope_type": "yarn", "factor": 4}\''
    )


def check_weights_fit(weight_bytes: int, free_bytes: int, device: str) -> None:
    """Raise DoesNotFit, before loading, when the weights alone are more than what is free."""
    if weight_bytes > free_bytes:
        raise DoesNotFit(
            f"the model does not fit: its weights need {_mib(weight_bytes)}, {device} has {_mib(free_bytes)} free; "
            "use a smaller model or a narrower dtype (bfloat16)"
        )


def check_adapters_fit(num_bytes: int, weight_bytes: int, free_bytes: int, config: EngineConfig) -> None:
    """Raise DoesNotFit, before loading, when the weights fit and the places for adapters beside them do not."""
    if weight_bytes + num_bytes > free_bytes:
        raise DoesNotFit(
            f"{config.num_adapter_slots} places for LoRA adapters of rank {config.max_lora_rank} need {_mib(num_bytes)} beside "
            f"weights of {_mib(weight_bytes)}, {config.device} has {_mib(free_bytes)} free; lower max_loras or max_lora_rank"
        )


def kv_shape(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    free_bytes: int,
    step_bytes: int = 0,
    draft_block_bytes: int = 0,
) -> KVShape:
    """Return the pool's shape: from num_blocks, else from kv_memory_mb, else a share of `free_bytes` (measured with weights
    loaded), of which steps need `step_bytes`. A draft model's pool besides it takes `draft_block_bytes` for each of its blocks:
    out of the same share, but not out of kv_memory_mb.

    Without num_blocks the pool must hold at least one sequence of max_context. Raises DoesNotFit otherwise.
    """
    own = _shape(config, model, dtype, 1).bytes_per_block
    block = own + draft_block_bytes
    free_bytes = max(0, free_bytes - step_bytes)
    free = f"{config.device} has {_mib(free_bytes)} free" + (f" beside {_mib(step_bytes)} for steps" if step_bytes else "")
    pool = "the KV pool with the draft model's" if draft_block_bytes else "the KV pool"
    per_sequence = -(-effective_max_context(config, model) // config.block_size)
    if config.num_blocks:
        num_blocks = config.num_blocks
    elif config.kv_memory_mb:
        num_blocks = config.kv_memory_mb * MIB // own
    else:
        share = config.kv_memory_share or default_kv_share(config.device)
        num_blocks = min(int(share * free_bytes) // block, config.max_num_seqs * per_sequence)
    if not config.num_blocks and num_blocks < per_sequence:
        raise DoesNotFit(
            f"{pool} holds {num_blocks} blocks ({_mib(num_blocks * block)}), one sequence of "
            f"{effective_max_context(config, model)} tokens needs {per_sequence} ({_mib(per_sequence * block)}), "
            f"{free}; lower max_context, or raise kv_memory_mb or kv_memory_share"
        )
    if num_blocks * block > free_bytes:
        raise DoesNotFit(
            f"{pool} needs {_mib(num_blocks * block)} ({num_blocks} blocks), {free}; lower num_blocks or kv_memory_mb"
        )
    return _shape(config, model, dtype, num_blocks)


def _shape(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, num_blocks: int) -> KVShape:
    return KVShape(model.num_layers, num_blocks, config.block_size, model.pool_heads, kv_head_size(model.pool_dim, dtype), dtype)


def torch_step_bytes(model: ModelConfig, item_size: int, num_tokens: int, num_rows: int) -> int:
    """Return an upper bound of what torch holds at once in a step of so many tokens and rows of logits, in a dtype of
    `item_size` bytes: states, and what attention, an MLP or the output head needs besides. Of experts, one may get all tokens.

    Norms, rotations and activations compute in float32: in a narrower dtype they hold their numbers twice."""
    each = item_size if item_size == _FLOAT else item_size + _FLOAT
    part = num_tokens * max(_attention_bytes(model, each), _mlp_bytes(model, each))
    head = num_rows * (model.vocab_size + model.hidden_size) * (item_size + _FLOAT)
    return num_tokens * 4 * model.hidden_size * each + max(part, head)


def _attention_bytes(model: ModelConfig, each: int) -> int:
    """Return what one token needs: queries, keys and values as they are mapped, rotated, packed and attended; scores of a chunk
    of keys, their weights and the mask."""
    latent = model.latent
    query, value = (latent.width, latent.kv_rank) if latent else (model.head_dim, model.head_dim)
    heads = model.num_heads * (4 * query + 3 * value)
    return (heads + 4 * model.pool_heads * model.pool_dim) * each + model.num_heads * 3 * CHUNK_KEYS * _FLOAT


def _mlp_bytes(model: ModelConfig, each: int) -> int:
    """Return what one token needs: both halves of the inner states, their activation and product; with experts also their input,
    contributions and sum, and the router's scores."""
    experts = model.experts
    if experts is None:
        return 5 * model.intermediate_size * each
    dense = 0 if all(experts.layers) else model.intermediate_size
    inner = max(experts.intermediate_size, experts.shared_intermediate_size, dense)
    return (5 * inner + 4 * model.hidden_size + 4 * experts.num_experts) * each + 6 * experts.top_k * 8


def free_memory(device: str) -> int:
    """Return bytes that can still be allocated: on CUDA the device's; on CPU the machine's, or the container's when that is less.

    Do not call it while requests run: it makes torch release the GPU memory that it has cached, such as the room in which a head
    was quantized, because that would count as used; and it waits for the device to do so."""
    if device == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        return int(free)
    return fallbacks.free_bytes()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"
