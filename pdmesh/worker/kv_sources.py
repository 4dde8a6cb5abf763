"""The sources of KV of a worker: its own tiers, and other workers."""

from __future__ import annotations

import time

from kvtransfer.kv_sources import Brought
from kvtransfer.tiers.tiers import KVTiers
from pdmesh.engine.request import EngineRequest
from pdmesh.v1 import prefill_pb2
from prefill_service.kv_pull import KVPuller


class WorkerKVSources:
    """Bring what the tiers have, then what another worker has beyond it. Satisfies `KVSources`."""

    def __init__(self, tiers: KVTiers | None, puller: KVPuller | None) -> None:
        """`None`: there is no such source."""
        self._tiers, self._puller = tiers, puller

    @property
    def is_moving(self) -> bool:
        return (self._tiers is not None and self._tiers.is_moving) or (self._puller is not None and self._puller.num_open > 0)

    async def bring(self, request: EngineRequest, holder: prefill_pb2.KVHolder | None) -> Brought:
        began_ns = time.monotonic_ns()
        num_restored = await self._tiers.restore(request) if self._tiers is not None else 0
        restored_ns = time.monotonic_ns() if self._tiers is not None else began_ns
        num_fetched = fetch_ns = 0
        if self._puller is not None and holder is not None:
            num_fetched = await self._puller.pull(request, holder)
            fetch_ns = time.monotonic_ns() - restored_ns
        return Brought(num_restored, restored_ns - began_ns, num_fetched, fetch_ns)
