"""The memory of a worker's KV pool for the transports: the pool itself, or pinned staging buffers where the pool is on a
device."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kvtransfer.manifest import PoolShape
from kvtransfer.staging import StagedMemory
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.nixl.transport import NixlTransport
from pdmesh.engine.engine import Engine
from pdmesh.engine.kv_cache.cuda_ipc import CudaSharing, NotShared, PoolSharing
from pdmesh.engine.kv_cache.ipc_pool import ShownPool
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import Streams, streams_of
from pdmesh.engine.parallel.staging import stage_ranks
from pdmesh.engine.parallel.tp_protocol import RankFailed
from pdmesh.runtime.config import ConfigError

logger = logging.getLogger(__name__)
DEPARTURES = StagingSizes(num_pieces=8)
ARRIVALS = StagingSizes(num_pieces=4)


def staged_memory(engine: Engine) -> StagedMemory | None:
    """Return the staged memory; None: the pool is in CPU memory, with all heads. Raises ConfigError when a rank cannot stage its
    part."""
    device = engine.kv.tensor.device
    if engine.ranks_with_pools is None:
        return None if device.type == "cpu" else stage(engine, streams_of(device), sharing=sharing_for(device))
    logger.warning("%s and %s are not used: each rank has a pool of its own", CudaIpcTransport.name, NixlTransport.name)
    try:
        return stage(engine, streams_of(device))
    except (RankFailed, RuntimeError) as error:
        raise ConfigError("--tensor-parallel", str(error)) from error


def stage(
    engine: Engine,
    streams: Streams,
    departures: StagingSizes = DEPARTURES,
    arrivals: StagingSizes = ARRIVALS,
    sharing: PoolSharing | None = None,
) -> StagedMemory:
    """Return the engine's pool through staging buffers. From now on the engine's steps mark their progress, so call it before the
    first step. `sharing`: how devices of other workers on this host can map the pool as well; unused where each rank has a pool.

    Raises ValueError for buffers too small for a block of a layer.
    """
    pool, ranks = engine.kv.tensor, engine.ranks_with_pools
    if ranks is not None:
        marks, (out, back) = stage_ranks(ranks, pool, streams, (departures, arrivals))
    else:
        marks, out, back = Marks(streams), Staging(pool, streams, departures), Staging(pool, streams, arrivals)
    engine.exports.signal.marks = marks
    for direction in (out, back):  # compiled now, because compiling while requests run would block the event loop
        direction.warm()
    shape = PoolShape(engine.kv.num_layers, engine.kv.num_blocks, out.block_bytes)  # with all heads
    return StagedMemory(shape, out, back, marks, shown_to_others(pool, streams, sharing))


def sharing_for(device: torch.device) -> PoolSharing | None:
    """Return how workers on this host can map the pool on `device`; None: they cannot."""
    try:
        return CudaSharing(device) if device.type == "cuda" else None
    except NotShared as error:
        logger.warning("%s is not used: %s", CudaIpcTransport.name, error)
        return None


def shown_to_others(pool: Tensor, streams: Streams, sharing: PoolSharing | None) -> ShownPool | None:
    """Return the pool that other processes may read, warmed up; None: its KV goes through host memory."""
    if sharing is None:
        return None
    try:
        shown = ShownPool(pool, sharing, streams)
    except NotShared as error:
        logger.warning("%s is not used: %s", CudaIpcTransport.name, error)
        return None
    shown.warm(streams.mark)
    return shown
