"""How the KV of a worker's pool meets the transports: as it lies, or by way of pinned pieces where it lies on a device."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from engine.cuda_sharing import CudaSharing
from engine.engine import Engine
from engine.pool_sharing import NotShared, PoolSharing
from engine.shown_pool import ShownPool
from engine.staging import Marks, Staging, StagingSizes
from engine.streams import Streams, streams_of
from kvtransfer.staged import StagedMemory
from kvtransfer.transports.cuda_ipc import CudaIpcTransport

logger = logging.getLogger(__name__)
DEPARTURES = StagingSizes(num_pieces=8)
ARRIVALS = StagingSizes(num_pieces=4)


def staged_memory(engine: Engine) -> StagedMemory | None:
    """None: the pool is in CPU memory, or holds a part of the KV heads only; the other ranks' are in other pools."""
    on_host = engine.kv.tensor.device.type == "cpu"
    if on_host or engine.kv.shape.num_kv_heads != engine.model_config.num_kv_heads:
        return None
    device = engine.kv.tensor.device
    return stage(engine, streams_of(device), sharing=sharing_for(device))


def stage(
    engine: Engine,
    streams: Streams,
    departures: StagingSizes = DEPARTURES,
    arrivals: StagingSizes = ARRIVALS,
    sharing: PoolSharing | None = None,
) -> StagedMemory:
    """The engine's pool by way of pieces; from now on its steps mark how far they are. Before the first step. `sharing`: how
    devices of other workers of this host are shown it, too.

    Raises ValueError for pieces too small for a block of a layer."""
    pool = engine.kv.tensor
    engine.exports.signal.marks = marks = Marks(streams)
    out, back = Staging(pool, streams, departures), Staging(pool, streams, arrivals)
    for direction in (out, back):  # what is compiled while requests run would keep the event loop from everybody else
        direction.warm()
    return StagedMemory(engine.kv, out, back, marks, shown_to_others(pool, streams, sharing))


def sharing_for(device: torch.device) -> PoolSharing | None:
    """How workers of this host are shown a pool there; None: not at all."""
    try:
        return CudaSharing(device) if device.type == "cuda" else None
    except NotShared as error:
        logger.warning("%s is not used: %s", CudaIpcTransport.name, error)
        return None


def shown_to_others(pool: Tensor, streams: Streams, sharing: PoolSharing | None) -> ShownPool | None:
    """Warmed up. None: KV of it goes through memory of the host."""
    if sharing is None:
        return None
    try:
        shown = ShownPool(pool, sharing, streams)
    except NotShared as error:
        logger.warning("%s is not used: %s", CudaIpcTransport.name, error)
        return None
    shown.warm(streams.mark)
    return shown


def transports_of(engine: Engine, staged: StagedMemory | None, transports: tuple[str, ...]) -> tuple[str, ...]:
    """Of `transports`, those that can write to the pool. cuda_ipc and nixl ask whether a staged one is shown."""
    return transports if staged is not None or engine.config.device == "cpu" else ()
