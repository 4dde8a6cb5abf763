"""Scales of a KV pool in fp8: the factors of its numbers, for each layer's keys and for its values.

Pools in fp8 have those of the checkpoint, else 1: keys and values of most models lie within e4m3's ±448, and its
relative error does not depend on a scale. So workers with one weights hash have the same scales, and their blocks are
interchangeable.
"""

from __future__ import annotations

import logging
import math

import torch

from pdmesh.engine.loader.safetensors import WeightSource

KVScales = tuple[tuple[float, float], ...]
"""(keys, values) of each layer."""
# The names of compressed-tensors and of ModelOpt, within a layer's `self_attn`.
_NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
STORED = r"model\.layers\.\d+\.self_attn\.(k_scale|v_scale|k_proj\.k_scale|v_proj\.v_scale)"
"""A pattern of these names."""


logger = logging.getLogger(__name__)


def pool_scales(source: WeightSource, kv_dtype: torch.dtype) -> KVScales:
    """Return the scales of a pool of this type: empty unless it is fp8. Raises ValueError like `read_kv_scales`."""
    return read_kv_scales(source) if kv_dtype == torch.float8_e4m3fn else ()


def known_scales(source: WeightSource, kv_dtype: torch.dtype) -> KVScales:
    """Return the scales for reading fp8 blocks that other workers push: the same ones, whatever the type of the own pool. Invalid
    scales do not make the checkpoint invalid unless the pool is fp8: no worker can then have an fp8 pool with these weights,
    so that none are pushed. Raises ValueError like `read_kv_scales`, for fp8."""
    try:
        return read_kv_scales(source)
    except ValueError as error:
        if kv_dtype == torch.float8_e4m3fn:
            raise
        logger.warning("the checkpoint's scales of KV in fp8 are of no use (%s): no worker can serve it with kv_dtype=fp8", error)
        return ()


def read_kv_scales(source: WeightSource) -> KVScales:
    """Return the scales of all layers. Raises ValueError naming the tensor: a pair is incomplete, or one is no positive
    number."""
    names = source.names()
    return tuple(_of_layer(source, names, f"model.layers.{index}.self_attn") for index in range(source.config.num_layers))


def _of_layer(source: WeightSource, names: frozenset[str], prefix: str) -> tuple[float, float]:
    for key, value in _NAMES:
        if f"{prefix}.{key}" in names or f"{prefix}.{value}" in names:
            return _scale(source, f"{prefix}.{key}"), _scale(source, f"{prefix}.{value}")
    return 1.0, 1.0


def _scale(source: WeightSource, name: str) -> float:
    tensor = source.get(name)
    if tensor.numel() != 1:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}; keys and values of a layer have one scale each")
    scale = float(tensor)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name}: {scale} is no scale; the checkpoint is damaged")
    return scale
