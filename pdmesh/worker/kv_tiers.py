"""The tiers of a worker: those that its settings ask for, on its engine's pool."""

from __future__ import annotations

from collections.abc import Callable

from kvtransfer.tiers.pool_blocks import pool_blocks
from kvtransfer.tiers.settings import open_tiers
from kvtransfer.tiers.threads import TierThreads
from kvtransfer.tiers.tiers import READ_AHEAD, KVTiers, TierTools
from pdmesh.runtime.config import ConfigError
from pdmesh.v1 import common_pb2
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.base import WorkerEngine

READING_THREADS = READ_AHEAD
COPYING_THREADS = 2


def open_kv_tiers(
    config: WorkerConfig,
    engine: WorkerEngine,
    identity: common_pb2.Identity,
    layout: common_pb2.KVLayout,
    compute_s: Callable[[int, int], float | None],
) -> KVTiers | None:
    """Return the tiers; None: none is asked for. Call it before the engine is opened. Raises ConfigError."""
    if not config.tiers.has_any:
        return None
    if engine.sharing is None:
        raise ConfigError("--kv-disk", f"the engine {engine.facts.name} has no tiers; leave --kv-disk and --kv-host-gb out")
    copying = TierThreads(COPYING_THREADS, name="kv-tier-copy", is_behind=False)
    blocks = pool_blocks(engine.memory, copying)
    try:
        tiers = open_tiers(config.tiers, identity, layout, blocks.block_bytes)
    except ValueError as error:
        copying.close()
        field, _, problem = str(error).partition(": ")
        raise ConfigError(f"--{field.replace('_', '-')}", problem) from error
    engine.sharing.watch_published(engine.facts.num_blocks)
    tools = TierTools(
        sharing=engine.sharing,
        release=engine.release,
        blocks=blocks,
        copying=copying,
        reading=TierThreads(READING_THREADS, name="kv-tier-read", is_behind=False),
        writing=TierThreads(1, name="kv-tier-write", is_behind=True),
        block_size=layout.block_size,
        compute_s=compute_s,
        restores=config.tiers.kv_restore,
    )
    return KVTiers(tiers, tools)
