"""The sources of KV of a worker beside computing it: its own tiers, and other workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvtransfer.conversion import kv_format
from kvtransfer.kv_sources import Brought
from kvtransfer.layout import Layout
from kvtransfer.rounding import Rounding
from kvtransfer.tiers.opening import open_tiers
from kvtransfer.tiers.pool_blocks import pool_blocks
from kvtransfer.tiers.threads import TierThreads
from kvtransfer.tiers.tiers import NOTHING, KVTiers, TierTools
from pdmesh.engine.interface import KVSharing
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.config import ConfigError
from pdmesh.v1 import common_pb2, prefill_pb2
from pdmesh.worker.config import WorkerConfig
from pdmesh.worker.engines.base import WorkerEngine
from prefill_service.kv_pull import KVPuller

COPYING_THREADS = 2


class WorkerKVSources:
    """Bring what the tiers have, then what another worker has beyond it. Satisfies `KVSources`."""

    def __init__(self, sharing: KVSharing | None, tiers: KVTiers | None, puller: KVPuller | None) -> None:
        """`tiers`, `puller` None: there is no such source. `sharing` None: there is none."""
        self._sharing, self._tiers, self._puller = sharing, tiers, puller

    @property
    def is_moving(self) -> bool:
        return (self._tiers is not None and self._tiers.is_moving) or (self._puller is not None and self._puller.num_open > 0)

    async def bring(self, request: EngineRequest, holder: prefill_pb2.KVHolder | None) -> Brought:
        began_ns = time.monotonic_ns()
        if self._sharing is not None and (self._tiers is not None or holder is not None):
            await self._sharing.claim(request)
        restored = await self._tiers.restore(request) if self._tiers is not None else NOTHING
        restored_ns = time.monotonic_ns() if self._tiers is not None else began_ns
        num_fetched: int | None = 0
        fetch_ns = 0
        if self._puller is not None and holder is not None and not restored.was_late:  # it has waited once already
            num_fetched = await self._puller.pull(request, holder)
            fetch_ns = time.monotonic_ns() - restored_ns
        restore_ns, fetch_failed = restored_ns - began_ns, num_fetched is None
        return Brought(restored.num_tokens, restore_ns, num_fetched or 0, fetch_ns, fetch_failed)


def kv_tiers_of(
    config: WorkerConfig,
    engine: WorkerEngine,
    identity: common_pb2.Identity,
    layout: common_pb2.KVLayout,
    compute_s: Callable[[int, int], float | None],
) -> KVTiers | None:
    """Return the tiers that the settings ask for, still without any; None: none is asked for. Call it before the engine is
    opened. Raises ConfigError."""
    if not config.tiers.has_any:
        return None
    if engine.sharing is None:
        given = next(name for name in ("kv_disk", "kv_store", "kv_host_gb") if getattr(config.tiers, name))
        problem = f"the engine {engine.facts.name} has no tiers; leave --kv-host-gb, --kv-disk and --kv-store out"
        raise ConfigError(f"--{given.replace('_', '-')}", problem)
    rounding = _rounding_of(config, engine, identity, layout)
    engine.sharing.watch_published(engine.facts.num_blocks)
    copying = TierThreads(COPYING_THREADS, name="kv-tier-copy", is_behind=False)
    tools = TierTools(
        sharing=engine.sharing,
        release=engine.release,
        blocks=pool_blocks(engine.memory, copying),
        copying=copying,
        block_size=layout.block_size,
        compute_s=compute_s,
        restores=config.tiers.kv_restore,
        writes=config.tiers.kv_write,
        rounding=rounding,
    )
    return KVTiers(tools)


def _rounding_of(
    config: WorkerConfig, engine: WorkerEngine, identity: common_pb2.Identity, layout: common_pb2.KVLayout
) -> Rounding | None:
    """Return how the tiers round; None: they do not. Raises ConfigError where the pool's KV cannot be rounded."""
    if not config.tiers.rounds:
        return None
    try:
        rounding = Rounding(kv_format(identity, Layout.of(layout)), engine.memory.num_layers, config.tiers.kv_tier_dtype)
    except ValueError as error:
        raise ConfigError("--kv-tier-dtype", str(error).partition(": ")[2]) from error
    if engine.memory.num_planes != 2 or engine.memory.bytes_per_layer_block != rounding.source.num_bytes:
        raise ConfigError("--kv-tier-dtype", f"KV arranged as {layout.arrangement} is not rounded here; leave it at pool")
    return rounding


async def open_kv_tiers(tiers: KVTiers, config: WorkerConfig, identity: common_pb2.Identity, layout: common_pb2.KVLayout) -> None:
    """Look what there is already, in a thread: a folder may hold hundreds of thousands of files. Raises ConfigError."""
    try:
        tiers.use(await asyncio.to_thread(open_tiers, config.tiers, identity, layout, tiers.block_bytes, config.mesh))
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        raise ConfigError(f"--{field.replace('_', '-')}", problem) from error
