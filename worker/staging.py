"""How the KV of a worker's pool meets the transports: as it lies, or by way of pinned pieces where it lies on a device."""

from __future__ import annotations

from engine.engine import Engine
from engine.staging import Marks, Staging, StagingSizes
from engine.streams import Streams, streams_of
from kvtransfer.staged import StagedMemory
from kvtransfer.transports.nixl import NixlTransport

DEPARTURES = StagingSizes(num_pieces=8)
ARRIVALS = StagingSizes(num_pieces=4)


def staged_memory(engine: Engine) -> StagedMemory | None:
    """None: the pool is in CPU memory, or holds a part of the KV heads only; the other ranks' are in other pools."""
    on_host = engine.kv.tensor.device.type == "cpu"
    if on_host or engine.kv.shape.num_kv_heads != engine.model_config.num_kv_heads:
        return None
    return stage(engine, streams_of(engine.kv.tensor.device))


def stage(
    engine: Engine, streams: Streams, departures: StagingSizes = DEPARTURES, arrivals: StagingSizes = ARRIVALS
) -> StagedMemory:
    """The engine's pool by way of pieces; from now on its steps mark how far they are. Before the first step.

    Raises ValueError for pieces too small for a block of a layer."""
    pool = engine.kv.tensor
    engine.exports.signal.marks = marks = Marks(streams)
    out, back = Staging(pool, streams, departures), Staging(pool, streams, arrivals)
    for direction in (out, back):  # what is compiled while requests run would keep the event loop from everybody else
        direction.warm()
    return StagedMemory(engine.kv, out, back, marks)


def transports_of(engine: Engine, staged: StagedMemory | None, transports: tuple[str, ...]) -> tuple[str, ...]:
    """Of `transports`, those that can write to the pool. A peer's nixl writes to CPU memory itself."""
    if staged is not None:
        return tuple(name for name in transports if name != NixlTransport.name)
    return transports if engine.config.device == "cpu" else ()
