"""The maps around latent attention, and what goes into the pool.

Queries are multiplied with the keys' map before attention, and what it gives with the values' behind it, by torch; keys and
values are never expanded, for prompts neither. Roundings are those of pdmesh/engine/models/decoder.py.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pdmesh.engine.kernels.triton.latent.kernels import latent_store_kernel
from pdmesh.engine.kernels.triton.norms import normalized
from pdmesh.engine.models.config import LatentConfig
from pdmesh.engine.models.decoder import LatentMaps
from pdmesh.engine.models.layers import RotaryTable


def store_latents(
    fused: Tensor, maps: LatentMaps, latent: LatentConfig, kv: Tensor, rotary: RotaryTable, positions: Tensor, slots: Tensor,
    query: Tensor, kv_scales: Tensor | None,
) -> None:  # fmt: skip
    """Write latents of the layer's first product, fused [T, ...], to their slots of kv [2, blocks, block_size, 1, width / 2], and
    absorbed queries to `query` [T, num_heads, width]."""
    queries, stored = fused[:, : -latent.width], fused[:, -latent.width :]
    if maps.queries is not None and maps.query_norm is not None:
        queries = maps.queries(normalized(queries, maps.query_norm, _like(queries)))
    normed = stored[:, : latent.kv_rank]
    normed = normalized(normed, maps.latent_norm, _like(normed))
    keys, num_heads = stored[:, latent.kv_rank :], query.shape[1]
    cos, sin, rotary_dim = rotary.cos, rotary.sin, rotary.cos.shape[1]
    latent_store_kernel[(len(fused), num_heads + 1)](
        queries, normed, keys, cos, sin, positions, slots, query, kv[0], kv[1], query if kv_scales is None else kv_scales,
        queries.stride(0), normed.stride(0), keys.stride(0), query.stride(0), query.stride(1), kv.stride(2),
        HEADS=num_heads, NOPE=latent.nope_dim, ROPE=latent.rope_dim, RANK=latent.kv_rank, HALF=latent.width // 2,
        ROTARY=rotary_dim, ROPE_PAD=triton.next_power_of_2(latent.rope_dim), WIDTH_PAD=triton.next_power_of_2(latent.width),
        HAS_SCALES=kv_scales is not None, num_warps=1,
    )  # fmt: skip
    plain = queries.view(len(queries), num_heads, -1)[:, :, : latent.nope_dim]
    query[:, :, : latent.kv_rank] = torch.bmm(plain.transpose(0, 1), maps.key_map).transpose(0, 1)


def expanded_values(attended: Tensor, maps: LatentMaps) -> Tensor:
    """Map attended [T, num_heads, kv_rank] -> values of the heads [T, num_heads * value_dim]."""
    return torch.bmm(attended.transpose(0, 1), maps.value_map).transpose(0, 1).flatten(1)


def _like(x: Tensor) -> Tensor:
    """Return rows of their own for what a part of each row becomes."""
    return x.new_empty(x.shape)
