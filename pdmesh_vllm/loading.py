"""The loading of vLLM's EngineCore in this process, and what it says of its model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvtransfer.layout import JOINED
from pdmesh.engine.hardware import ModelCost
from pdmesh.engine.loader.hash import weights_hash
from pdmesh.engine.models.config import token_ids
from pdmesh.worker.engines.registry import PACKAGES
from pdmesh_vllm.link import LINK, RANKS, Link, close_link, open_link
from pdmesh_vllm.ranks.link import permit_amx
from pdmesh_vllm.ranks.server import RankServer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore


_RANKS_READY_S = 60.0
"""How long ranks may take to map the pool once vLLM has started: they have by then."""


@dataclass(frozen=True)
class LoadedCore:
    """Hold an EngineCore and what belongs to it."""

    core: EngineCore
    config: VllmConfig
    link: Link
    link_name: str
    ranks: RankServer | None = None  # where vLLM's workers are processes of their own

    def weights(self) -> list[Weight]:
        """Return the weights of all ranks; what each of them has whole is there as often."""
        found: list[list[Weight]] = self.core.model_executor.collective_rpc(weights_of)
        return [weight for each in found for weight in each]

    def close(self) -> None:
        """Free everything; idempotent."""
        close_link(self.link_name)
        self.core.shutdown()
        if self.ranks is not None:
            self.ranks.close()


class Weight(NamedTuple):
    """Describe a parameter of the model in one rank."""

    name: str
    num_numbers: int
    num_bytes: int


def weights_of(worker: Any) -> list[Weight]:
    """Return the weights of one of vLLM's workers, in whose process this is called."""
    parameters = worker.worker.model_runner.get_model().named_parameters()
    return [Weight(name, each.numel(), each.numel() * each.element_size()) for name, each in parameters]


def load_core(arguments: Mapping[str, object]) -> LoadedCore:
    """Load vLLM with these EngineArgs. Raises ValueError for settings that vLLM refuses."""
    weight_files(Path(str(arguments["model"])))
    permit_amx()
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    link_name = f"{os.getpid()}-{id(arguments):x}"
    link = open_link(link_name)
    ranks = RankServer(link, num_ranks) if (num_ranks := int(str(arguments.get("tensor_parallel_size", 1)))) > 1 else None
    transfer = KVTransferConfig(
        kv_connector="PdmeshConnector",
        kv_connector_module_path="pdmesh_vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={LINK: link_name, **({RANKS: ranks.address} if ranks is not None else {})},
    )
    args = EngineArgs(
        **dict(arguments),
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        logits_processors=["pdmesh_vllm.sampling:PdmeshDraw"],
        async_scheduling=False,  # the draw needs the token before
        disable_log_stats=True,
    )
    try:
        config = args.create_engine_config()
        _check_split(config)
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
        if ranks is not None:
            ranks.wait_ready(_RANKS_READY_S)
    except BaseException:
        close_link(link_name)
        if ranks is not None:
            ranks.close()
            ranks.check()
        raise
    return LoadedCore(core, config, link, link_name, ranks)


def _check_split(config: VllmConfig) -> None:
    """Raise ValueError for a model whose KV heads the ranks do not divide: vLLM would keep some of them twice."""
    num_ranks, num_heads = config.parallel_config.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    if num_heads % num_ranks:
        whole = [each for each in range(1, num_heads + 1) if num_heads % each == 0]
        raise ValueError(f"tensor_parallel: {num_ranks} does not divide the model's {num_heads} KV heads; give one of {whole}")


# What the model is.


def hash_of(config: VllmConfig) -> str:
    """Return the hash of the model folder's weights, the one that our own engine has of the same folder."""
    folder = Path(config.model_config.model)
    return weights_hash(sorted([folder / "config.json", *weight_files(folder)]))


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights. Raises ValueError where there are none: their hash is how workers know one model."""
    files = list(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(f"model: {folder} is no folder with config.json and safetensors; get the model, and give its folder")
    return files


def numeric_mode(config: VllmConfig) -> str:
    """Return what the bits of the logits depend on beside the weights: equal on both ends of a hand-off."""
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    parts = [f"vllm-{PACKAGES['vllm'].series}", dtype]
    if model.quantization:
        parts.append(str(model.quantization))
    if is_batch_invariant(config.device_config.device_type):
        parts.append("batch-invariant")
    if model.hf_overrides:  # it computes otherwise, so it is another model to the mesh
        parts.append(sha256(json.dumps(model.hf_overrides, sort_keys=True, default=str).encode()).hexdigest()[:12])
    return "-".join(parts)


def is_batch_invariant(device: str) -> bool:
    """Return whether vLLM promises logits that do not depend on the batch: if it is asked to, and has such kernels."""
    return device == "cuda" and os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def layout_name(config: VllmConfig, caches: Mapping[str, Tensor]) -> str:
    """Return the arrangement of numbers in vLLM's blocks: its layout; its CPU backend packs them for the machine's instructions
    as well."""
    layout = f"{JOINED}vllm-{str(config.cache_config.kv_cache_layout).lower()}"
    if next(iter(caches.values())).device.type != "cpu":
        return layout
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    first = next(iter(caches.values()))
    _, _, block_size, twice_dim = first.shape
    isa = _get_attn_isa(first.dtype, block_size, twice_dim // 2, config.cache_config.cache_dtype)
    return f"{layout}-{isa}"


def eos_of(config: VllmConfig) -> frozenset[int]:
    """Return the end-of-sequence ids: generation_config.json's where it has them, else config.json's, as our own engine does."""
    model = config.model_config
    return token_ids(model.try_get_generation_config().get("eos_token_id")) or token_ids(model.hf_text_config.eos_token_id)


def cost_of(loaded: LoadedCore) -> ModelCost:
    """Return what steps cost, from the sizes of the model's weights and caches."""
    model, config = loaded.config.model_config, loaded.config
    text = model.hf_text_config
    sizes = loaded.weights()
    num_experts = int(getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0) or 0)
    expert_bytes = sum(size for name, _, size in sizes if num_experts and ".experts." in name)
    head = model.get_vocab_size() * model.get_hidden_size()
    embeddings = sum(count for name, count, _ in sizes if "embed_tokens" in name or "wte" in name)
    counted = sum(count for _, count, _ in sizes) - embeddings
    first = next(iter(loaded.link.caches.values()))
    num_layers = len(loaded.link.caches)
    return ModelCost(
        backend="torch",
        numbers=str(model.dtype).removeprefix("torch."),
        num_layers=num_layers,
        num_weights=counted if getattr(text, "tie_word_embeddings", False) else max(0, counted - head),
        num_head_weights=head,
        weight_bytes=sum(size for _, _, size in sizes) - expert_bytes,
        kv_bytes_per_token=num_layers * first[0].numel() * first.element_size() // first.shape[2],
        attention_operations=4 * num_layers * model.get_num_attention_heads(config.parallel_config) * model.get_head_size(),
        expert_bytes=expert_bytes // num_experts if num_experts else 0,
        num_experts=num_experts,
        top_k=int(getattr(text, "num_experts_per_tok", 0) or 0) if num_experts else 0,
    )


def kv_shape(caches: Mapping[str, Tensor]) -> tuple[int, int, int, int]:
    """Return blocks, heads, tokens of a block, and twice the head dimension. Raises ValueError for KV of another kind."""
    name, first = next(iter(caches.items()))
    if first.dim() != 4:
        raise ValueError(
            f"model: vLLM keeps the KV of {name} as {tuple(first.shape)}, without heads; it cannot be handed off yet"
        )
    num_blocks, num_heads, block_size, twice_dim = first.shape
    return num_blocks, num_heads, block_size, twice_dim


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a KV dtype on the wire."""
    return str(dtype).removeprefix("torch.")
